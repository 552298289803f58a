"""What benchmarks run and how they count."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import pytest

from penstock.cli.bench import latency, startup, throughput
from penstock.cli.bench.common import benchmark_options, report, spread, workload_from_args
from penstock.cli.bench.workloads import NAMES, Shape, Workload, named_workload, random_workload
from penstock.cli.main import build_parser
from penstock.protocol.errors import EngineDeadError

# sha256 of json.dumps([prompts, output lengths, temperature]): what every engine that is compared
# runs. A digest that changes makes all earlier numbers meaningless.
DIGESTS = {
    "nano": "c34e33bb593a8e54cac32c5c346b110c0bf6d4ddac24fd421e6a42c04bcda0b7",
    "thr": "9f5400bbc73f6e3c12f80b72cd1361506ed629fc498fa0a6a531974d8b543327",
    "dec1": "6a82e749256910f0f8d0ed59f244c6a556714b423f5e1c5c66c0b1cdcdd818ce",
    "dec64": "348623f409c7e59c8d8e37270bbfbd35be60036377bfcaf992d66a492500cc80",
    "pre": "90491cb31ccd532fbdd99addb808fa48650ef0cb2c36f320e87fd5d7757bcd67",
    "cpu_a": "8442b8414cd50aed4abdc71155d57df7d7f63cd84c52074d141f8f71ce9b870d",
    "cpu_b": "b6b4bebd99e60375cb29f0c6111e7ddc814b8ae8df929444d4bc7da29accd860",
    "cpu_c": "3b50be8a4971cc29445a230810380f403e17f53a4db4e9074723d96eed3d5c45",
    "cpu_p": "c61366ffc1e4f435cc9578d4315076ae2a8615e661ebd07d7bac757cf0db2cd3",
}


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *arguments])


@pytest.mark.parametrize("name", DIGESTS)
def test_a_reference_workload_never_changes(name: str) -> None:
    workload = named_workload(name)
    content = json.dumps([workload.prompts, workload.output_lens, workload.temperature])
    assert hashlib.sha256(content.encode()).hexdigest() == DIGESTS[name]


def test_all_reference_workloads_are_offered_by_name() -> None:
    assert set(NAMES) == set(DIGESTS)
    assert workload_from_args(parse("throughput", "--workload", "cpu_p")).name == "cpu_p"


def test_lengths_are_exact_and_end_of_text_is_ignored() -> None:
    workload = random_workload(Shape(3, 5, 7))
    assert [len(prompt) for prompt in workload.prompts] == [5, 5, 5]
    for params in workload.sampling_params(detokenize=False):
        assert (params.max_tokens, params.ignore_eos, params.detokenize) == (7, True, False)
        assert params.is_greedy


def test_a_random_workload_is_the_same_every_time() -> None:
    assert random_workload(Shape(3, (2, 9), 4)) == random_workload(Shape(3, (2, 9), 4))


def test_counts_and_lengths_come_from_flags() -> None:
    args = parse("throughput", "--num-prompts=3", "--input-len=4", "--output-len=5")
    workload = workload_from_args(args)
    assert (len(workload.prompts), workload.num_input_tokens) == (3, 12)
    assert workload.output_lens == [5, 5, 5]
    assert len(workload_from_args(parse("latency", "--batch-size=2")).prompts) == 2
    assert len(workload_from_args(parse("latency")).prompts) == 1


def test_prefix_caching_is_off_unless_asked_for() -> None:
    assert benchmark_options(parse("latency")) == {"enable_prefix_caching": False}
    args = parse("latency", "--enable-prefix-caching", "--max-num-seqs", "4")
    assert benchmark_options(args) == {"enable_prefix_caching": True, "max_num_seqs": 4}


def test_requests_take_the_base_or_an_adapter_at_random_and_repeatably() -> None:
    modules = parse("throughput", "--lora-modules", "sql=/sql", "law=/law").lora_modules
    picked = throughput.pick_adapters(modules, 60, seed=0)
    assert picked is not None
    found = {None if item is None else (item.lora_name, item.lora_path) for item in picked}
    assert found == {None, ("sql", "/sql"), ("law", "/law")}
    assert throughput.pick_adapters(modules, 60, seed=0) == picked
    assert throughput.pick_adapters(modules, 60, seed=1) != picked
    assert throughput.pick_adapters([], 60, seed=0) is None


def test_an_adapter_without_a_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("throughput", "--lora-modules", "sql")
    assert "must be name=path" in capsys.readouterr().err


def test_throughput_is_counted_from_the_median_run() -> None:
    workload = Workload("w", [[1] * 10, [1] * 30], [20, 40], 0.0)
    results = throughput.summarize(workload, [4.0, 2.0, 100.0])
    assert results["requests_per_s"] == 0.5
    assert results["output_tokens_per_s"] == 15.0
    assert results["total_tokens_per_s"] == 25.0


def test_of_a_pooling_model_texts_and_their_tokens_are_counted() -> None:
    workload = Workload("w", [[1] * 10, [1] * 30], [20, 40], 0.0)
    results = throughput.summarize_pooling(workload, [4.0, 2.0, 100.0])
    assert (results["num_texts"], results["num_tokens"]) == (2, 40)
    assert (results["texts_per_s"], results["tokens_per_s"]) == (0.5, 10.0)
    results = latency.summarize_pooling(workload, [1.0, 3.0])
    assert (results["batch_size"], results["total_ms"]["mean"]) == (2, 2.0)


def test_latency_counts_steps_after_the_first() -> None:
    workload = Workload("w", [[1], [1]], [3, 11], 0.0)
    results = latency.summarize(workload, [50.0, 60.0], [150.0, 160.0])
    assert results["time_to_first_token_ms"]["p50"] == 55.0
    assert results["ms_per_token"]["mean"] == 10.0
    assert results["num_output_tokens"] == 14


def test_latency_of_a_single_token_has_no_time_between_tokens() -> None:
    results = latency.summarize(Workload("w", [[1]], [1], 0.0), [50.0], [50.0])
    assert "ms_per_token" not in results


def test_percentiles_lie_between_neighbours() -> None:
    assert spread([3.0, 1.0, 2.0]) == {
        "mean": 2.0,
        "min": 1.0,
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "max": 3.0,
    }
    assert set(spread([7.0]).values()) == {7.0}


def test_the_table_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    report("latency", parse("latency"), {"workload": "w"}, {"ms": {"p50": 1.234}, "runs": [1, 2]})
    assert capsys.readouterr().out == "workload  w\nms        p50 1.23\n"


def test_json_on_standard_output_moves_the_table_away(capsys: pytest.CaptureFixture[str]) -> None:
    report("latency", parse("latency", "--json", "-"), {"workload": "w"}, {"runs": [1.5, 2.5]})
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["benchmark"] == "latency"
    assert document["runs"] == [1.5, 2.5]
    assert captured.err == "workload  w\n"


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    report("latency", parse("latency", "--json", str(target)), {}, {"ms": 1.5})
    assert json.loads(target.read_text())["ms"] == 1.5
    assert capsys.readouterr().out == "ms  1.50\n"


def test_a_process_that_dies_before_its_first_token_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"ended with code 1 before its first token: .+"):
        startup.measure_once({"model": str(tmp_path / "nothing-here")})
