"""`penstock plan`: its output, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from published import PUBLISHED, planner_of, write_config

from penstock.cli.main import main
from penstock.loading import hub
from penstock.planning.hardware import GPUS, find_gpu
from penstock.planning.plan import make_plan
from penstock.protocol.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path / "model", PUBLISHED["Qwen3-8B"]))


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1, "one line"
    return captured.err


def test_every_way_to_use_the_gpus_is_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, model, "--gpus", "8", "--gpu", "h100")
    splits = document["splits"]
    assert [(own["tp"], own["dp"]) for own in splits] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert all(own["fits"] for own in splits)
    weights = [own["weight_bytes"] for own in splits]
    assert weights == sorted(weights, reverse=True)
    one = splits[0]
    assert one["total"]["output_rate"] == pytest.approx(8 * one["speed"]["output_rate"])
    assert any("Nothing was measured on h100" in text for text in document["assumptions"])


def test_the_model_of_a_drafter_is_planned(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    settings: dict[str, Any] = {"speculators_model_type": "eagle3"}
    settings["speculators_config"] = {"verifier": {"name_or_path": model}}
    (drafter / "config.json").write_text(json.dumps(settings))
    sizes = ("--gpus", "2", "--gpu", "h100")
    assert plan(capsys, str(drafter), *sizes) == plan(capsys, model, *sizes)


@pytest.mark.parametrize(("tp", "leaves"), [(4, False), (8, True)])
def test_what_leaves_a_node_takes_longer(
    model: str, capsys: pytest.CaptureFixture[str], tp: int, leaves: bool
) -> None:
    sizes = ("--gpus", "16", "--tensor-parallel-size", str(tp))
    sizes += ("--data-parallel-size", str(16 // tp), "--max-model-len", "8192")
    (whole,) = plan(capsys, model, *sizes)["splits"]
    (apart,) = plan(capsys, model, *sizes, "--nodes", "4", "--network", "25")["splits"]
    assert (apart["speed"]["token"] > whole["speed"]["token"]) == leaves
    assert (apart["speed"]["output_rate"] < whole["speed"]["output_rate"]) == leaves


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--nodes", "3"), "--nodes must divide the 8 GPUs, got 3"),
     (("--nodes", "2", "--network", "0"), "--network must be above 0, got 0")],
)  # fmt: skip
def test_impossible_nodes_are_refused(
    model: str, capsys: pytest.CaptureFixture[str], flags: Sequence[str], message: str
) -> None:
    assert message in refusal(capsys, model, "--gpus", "8", *flags)


def test_stages_are_shown_if_asked_for_and_on_gpus_without_nvlink(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = plan(capsys, model, "--gpus", "4", "--pipeline-parallel-size", "2")["splits"]
    assert [(own["tp"], own["pp"], own["dp"]) for own in asked] == [(1, 2, 2), (2, 2, 1)]
    apart = plan(capsys, model, "--gpus", "4", "--gpu", "l40s")["splits"]
    sizes = [(own["tp"], own["pp"], own["dp"]) for own in apart]
    assert sizes == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    whole, halves = apart[0], apart[1]
    assert halves["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 2, rel=0.05)
    assert halves["speed"]["token"] > 0.9 * whole["speed"]["token"], "one request is no faster"
    assert halves["kv_bytes"] > whole["kv_bytes"]
    assert main(["plan", model, "--gpus", "2", "-pp", "2"]) == 0
    assert "--pipeline-parallel-size 2" in capsys.readouterr().out


def test_experts_are_sliced_or_spread_over_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_config(tmp_path, PUBLISHED["Qwen3-30B-A3B"]))
    splits = plan(capsys, folder, "--gpus", "4")["splits"]
    sizes = [(own["tp"], own["ep"], own["dp"]) for own in splits]
    assert sizes == [(1, 1, 4), (1, 4, 4), (2, 1, 2), (2, 4, 2), (4, 1, 1)]
    sliced, spread = splits[0], splits[1]
    assert spread["weight_bytes"] < sliced["weight_bytes"] / 3
    assert spread["num_requests"] >= sliced["num_requests"]
    only = plan(capsys, folder, "--gpus", "4", "--enable-expert-parallel")["splits"]
    assert [(own["tp"], own["ep"], own["dp"]) for own in only] == [(1, 4, 4), (2, 4, 2), (4, 4, 1)]
    assert main(["plan", folder, "--gpus", "4", "--enable-expert-parallel"]) == 0
    assert "--data-parallel-size 4 --enable-expert-parallel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_gpus", "nodes", "is_faster"),
    [(2, 1, True), (16, 1, False), (32, 4, True)],
)
def test_gathering_tokens_is_faster_where_a_token_would_be_sent_more_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_gpus: int, nodes: int, is_faster: bool
) -> None:
    """A token has 8 experts. Of 32 ranks on four nodes, 6 are reached over the network, but a token
    goes to three nodes once each."""
    folder = str(write_config(tmp_path, PUBLISHED["Qwen3-30B-A3B"]))
    sizes = ("--gpus", str(num_gpus), "--nodes", str(nodes), "--data-parallel-size", str(num_gpus))
    sizes += ("--enable-expert-parallel", "--all2all-backend")
    backends = ("all_to_all", "allgather_reducescatter")
    (sent,), (gathered,) = (plan(capsys, folder, *sizes, name)["splits"] for name in backends)
    assert (gathered["speed"]["prompt_rate"] > sent["speed"]["prompt_rate"]) == is_faster
    assert gathered["weight_bytes"] == sent["weight_bytes"]


def test_the_text_has_a_line_for_each_split_and_its_assumptions(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--gpus", "2", "--tensor-parallel-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 x h200" in text
    assert "--tensor-parallel-size 2" in text
    assert "Assumptions:" in text
    assert "are left out" in text, "of other kinds of parallelism"


def test_engine_options_count(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    base, fp8, short, less = (
        plan(capsys, model, *options)["splits"][0]
        for options in (
            (),
            ("--kv-cache-dtype", "fp8", "--quantization", "fp8"),
            ("--max-model-len", "2048"),
            ("--gpu-memory-utilization", "0.5"),
        )
    )
    assert fp8["kv_bytes_per_token"] * 2 == base["kv_bytes_per_token"]
    assert fp8["weight_bytes"] < 0.6 * base["weight_bytes"]
    assert fp8["num_requests"] > base["num_requests"]
    assert short["longest"] == 2048
    assert less["kv_bytes"] < base["kv_bytes"] / 2
    assumed = plan(capsys, model, "--quantization", "fp8")["assumptions"]
    assert any("quantized weights" in text for text in assumed)


def test_a_gpu_may_be_given_by_its_numbers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--memory", "139.8", "--bandwidth", "4.8", "--flops", "989")
    document = plan(capsys, model, *given)
    assert document["gpu"]["name"] == "custom"
    assert document["splits"] == plan(capsys, model, "--gpu", "h200")["splits"]
    larger = plan(capsys, model, "--gpu", "h200", "--memory", "200")
    assert larger["splits"][0]["kv_bytes"] > document["splits"][0]["kv_bytes"]


def test_a_cache_too_small_for_the_models_context_says_how_long_requests_may_be(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = (model, "--gpu", "h200", "--memory", "23")
    (split,) = plan(capsys, *tight)["splits"]
    assert split["fits"]
    assert split["longest"] < 40960
    tokens = split["kv_bytes"] / split["kv_bytes_per_token"]
    assert split["longest"] == pytest.approx(tokens, abs=2 * 16)  # a block, and the null block
    assert main(["plan", *tight]) == 0
    assert f"--max-model-len {split['longest']}" in capsys.readouterr().out


def test_a_model_without_logits_has_no_time_per_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, {**PUBLISHED["Qwen3-0.6B"], "architectures": ["Qwen3Model"]})
    (split,) = plan(capsys, str(folder))["splits"]
    assert split["speed"]["prompt_rate"] > 0
    assert split["speed"]["token"] == split["kv_bytes_per_token"] == 0
    assert main(["plan", str(folder)]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_splits_that_the_model_does_not_allow_are_explained(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, model, "--gpus", "6")
    assert [own["tp"] for own in document["splits"]] == [1, 2]
    assert set(document["refused"]) == {"tp=3", "tp=6"}
    assert main(["plan", model, "--gpus", "6"]) == 0
    assert "tp=3: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h300"], ["'h300'", "h200", "h100", "--bandwidth"]),
        (["--gpu", "A100_40GBs"], ["a100-40gb"]),
        (["--memory", "80"], ["--bandwidth and --flops"]),
        (["--memory", "-1", "--gpu", "h100"], ["--memory", "above 0"]),
        (["--bandwidth", "nan", "--gpu", "h100"], ["--bandwidth", "above 0"]),
        (["--gpus", "0"], ["--gpus", "at least 1"]),
        (["--input-len", "0"], ["--input-len", "at least 1"]),
        (["--input-len", "40960"], ["40960 + 256", "--input-len"]),
        (["--gpus", "2", "--tensor-parallel-size", "4"], ["4 GPUs", "--gpus is 2"]),
        (["--gpus", "4", "-dp", "3"], ["no way to use 4 GPUs with data_parallel_size=3"]),
        (["--gpus", "3", "--tensor-parallel-size", "3"], ["heads"]),
        (["--gpus", "8", "-tp", "2", "-dp", "2"], ["tensor_parallel_size=2, data_parallel_size=2"]),
        (["--gpus", "64", "--pipeline-parallel-size", "64"], ["at most 36"]),
        (["--gpus", "2", "--enable-expert-parallel"], ["this one has none"]),
        (["--max-model-len", "50000"], ["max_model_len"]),
        (["--gpu", "l4", "--gpus", "1", "--max-num-batched-tokens", "65536"], ["does not fit"]),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    arguments: list[str], words: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, model, *arguments)
    assert all(word in said for word in words), said


def test_a_model_that_does_not_fit_is_told_where_it_would(tmp_path: Path) -> None:
    folder = write_config(tmp_path, PUBLISHED["Qwen3-30B-A3B"])
    planner = planner_of(folder, find_gpu("a10"))
    with pytest.raises(ConfigError, match=r"56\.9 GiB for weights.* 4 x a10, .*1 x h100") as caught:
        make_plan(planner, 1)
    for count, name in ((4, "a10"), (1, "h100")):
        assert make_plan(planner_of(folder, find_gpu(name)), count).best.fits
        assert f"{count} x {name}" in str(caught.value)


def test_a_missing_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["plan", str(tmp_path / "empty")]) == 1
    assert "no config.json" in capsys.readouterr().err


def test_the_weights_of_a_hub_id_are_not_downloaded(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def snapshot(repo_id: str, revision: str | None, patterns: Sequence[str], *rest: Any) -> str:
        asked.extend(patterns)
        return model

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    assert plan(capsys, "somebody/model")["model"] == "somebody/model"
    assert asked
    assert not any("safetensors" in pattern and "index" not in pattern for pattern in asked)


def test_an_unknown_gpu_costs_no_import_of_torch() -> None:
    code = (
        "import sys\nfrom penstock.cli.main import main\n"
        "assert main(['plan', 'x', '--gpu', 'h1000']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def test_a_plan_is_plotted(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", model, "--gpus", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "cannot write" in refusal_after_output(
        capsys, model, "--plot", str(tmp_path / "no" / "plan.png")
    )


def refusal_after_output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["H200", "nvidia-h200", "a100_40gb", *GPUS])
def test_names_of_gpus_may_be_written_in_several_ways(name: str) -> None:
    assert find_gpu(name).name in GPUS
