"""Which architectures are known, where plugins come in, and that the page says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_engine import open_llm
from tiny_models import architecture_of, make_checkpoint
from tiny_variants import VARIANTS

from penstock import SamplingParams
from penstock.cli.main import main
from penstock.models.architectures import ARCHITECTURES, VISION
from penstock.models.base import Model
from penstock.models.docs import render
from penstock.models.plugins import find_plugins
from penstock.models.registry import find_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PLUGIN = """
from penstock.models.plugins import Plugin
plugin = Plugin(models={"RiverForCausalLM": "river.model:River"}, ops={"cpu": "river.ops"})
"""
MODEL = """
from penstock.models.llama import LlamaForCausalLM
class River(LlamaForCausalLM):
    pass
"""
OPS = """
from penstock.ops import reference
calls = []
def silu_mul(x):
    calls.append(x.shape)
    return reference.silu_mul(x)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with an entry point where Python finds packages."""

    def make(name: str, **files: str) -> None:
        site = tmp_path / "site"
        package, info = site / name, site / f"{name}-1.5.dist-info"
        for folder in (package, info):
            folder.mkdir(parents=True)
        for module, text in {"__init__": "", **files}.items():
            (package / f"{module}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[penstock.plugins]\n{name} = {name}:plugin\n")
        monkeypatch.syspath_prepend(str(site))
        for module in [each for each in sys.modules if each.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)

    return make


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m penstock.models.docs > docs/models.md"


def test_every_architecture_is_verified_by_all_of_its_checkpoints() -> None:
    checkpoints = {name: [] for name in ARCHITECTURES}
    for variant, (name, _) in VARIANTS.items():
        if architecture_of(name) not in VISION:
            checkpoints[architecture_of(name)].append(variant)
    assert {name: list(known.parity) for name, known in ARCHITECTURES.items()} == checkpoints
    assert all(checkpoints.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_its_class(name: str) -> None:
    found = find_model(["Nothing", name], find_plugins())
    assert found.__name__ == name
    assert issubclass(found, Model)


def test_the_table_is_read_without_torch_and_a_model_without_the_others() -> None:
    code = (
        "import sys, json; import penstock.models.registry as r; early = 'torch' in sys.modules;"
        "r.find_model(['Olmo2ForCausalLM'], r.find_plugins());"
        "print(json.dumps([early, [m for m in sys.modules if m.startswith('penstock.models.')]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    early, modules = json.loads(done.stdout)
    assert not early
    assert "penstock.models.olmo2" in modules
    assert "penstock.models.llama" not in modules


def test_a_model_that_is_known_needs_no_transformers(tmp_path: Path) -> None:
    config = json.loads((make_checkpoint(tmp_path, "olmo2") / "config.json").read_text())
    code = (
        "import sys, json, torch; from penstock.layers.build import Build;"
        "from penstock.models.registry import build_model; from penstock.ops.registry import Ops;"
        "build = Build(torch.float32, torch.device('meta'), 64, Ops('cpu'));"
        "build_model(json.loads(sys.argv[1]), build); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_architecture_is_told_its_nearest_names() -> None:
    with pytest.raises(ModelError) as caught:
        find_model(["Qwen3MoForCausalLM"], find_plugins())
    message = str(caught.value)
    assert "the nearest are Qwen3MoeForCausalLM, Qwen3ForCausalLM, " in message
    assert "supported: BertForMaskedLM, " in message
    assert " CohereForCausalLM, " in message


def test_a_plugin_brings_a_model_and_ops(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def generate() -> list[int]:
        with open_llm(checkpoint, cpu_backend="torch") as llm:
            (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        return output.outputs[0].token_ids

    expected = generate()
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["RiverForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'RiverForCausalLM'"):
        generate()
    install("river", __init__=PLUGIN, model=MODEL, ops=OPS)
    assert generate() == expected
    assert sys.modules["river.ops"].calls
    capsys.readouterr()
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plugins"] == {
        "river": {
            "package": "river 1.5",
            "models": {"RiverForCausalLM": "river.model:River"},
            "ops": {"cpu": "river.ops"},
        }
    }


def test_a_broken_plugin_is_told_and_harms_nobody(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("delta", __init__="raise RuntimeError('no water')")
    install("lake", __init__="plugin = 5")
    assert find_model(["LlamaForCausalLM"], find_plugins()).__name__ == "LlamaForCausalLM"
    with pytest.raises(ModelError, match=r"could not be loaded: 'delta' \(RuntimeError: no water"):
        find_model(["RiverForCausalLM"], find_plugins())
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert "  delta:\n    package: delta 1.5\n    error: RuntimeError: no water\n" in text
    assert "lake:plugin is no penstock.models.plugins.Plugin but 5" in text


def test_two_plugins_with_one_architecture_are_refused(install: Install) -> None:
    install("river", __init__=PLUGIN, model=MODEL, ops=OPS)
    install("stream", __init__=PLUGIN)
    with pytest.raises(ModelError, match="'river' and 'stream' both have RiverForCausalLM"):
        find_model(["LlamaForCausalLM"], find_plugins())


def test_without_plugins_there_are_none() -> None:
    assert find_plugins() == []
    assert Ops("cpu").find("norm_rotate_write") is None
