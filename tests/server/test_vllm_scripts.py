"""Scripts in the style of vLLM's examples run with their imports changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from lora.adapters import make_adapter
from server_process import ServerProcess, make_tiny_model

from penstock.executor import kv_budget

SCRIPTS = Path(__file__).parents[1] / "vllm_scripts"
CLIENTS = ["client"]
HINTS = {
    "hint_sleep": "enable_sleep_mode is not supported: stop the server: a start takes seconds",
    "hint_guided": "GuidedDecodingParams is not in Penstock: use StructuredOutputsParams",
}
OFFLINE = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in (*CLIENTS, *HINTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    settings = json.loads((folder / "config.json").read_text())
    config = transformers.LlamaConfig(**{**settings, "max_position_embeddings": 2048})
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), model)


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache, as nobody asks for one in a script: tiny blocks would be a million."""
    monkeypatch.setattr(kv_budget, "DEFAULT_CPU_KV_BYTES", 4 << 20)


def run(name: str, **replaced: str) -> None:
    """Run a script, with `penstock` for `vllm` in its imports and other models."""
    text = (SCRIPTS / f"{name}.py").read_text()
    text, num_imports = re.subn(r"^(from|import) vllm\b", r"\1 penstock", text, flags=re.MULTILINE)
    assert num_imports or name in CLIENTS
    for old, new in replaced.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    code = compile(text, f"{name}.py", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})


def test_there_are_twenty() -> None:
    assert len(OFFLINE) + len(CLIENTS) == 18
    assert len(HINTS) == 2


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("name", OFFLINE)
def test_a_script_runs_with_its_imports_changed(name: str, model: Path, adapter: Path) -> None:
    run(name, **{"facebook/opt-125m": str(model), "org/sql-adapter": str(adapter)})


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_runs_unchanged(name: str, server: ServerProcess) -> None:
    run(name, **{"http://localhost:8000/v1": f"{server.base_url}/v1"})


@pytest.mark.parametrize("name", HINTS)
def test_a_script_that_cannot_run_is_told_what_to_do(name: str, model: Path) -> None:
    with pytest.raises(Exception, match=re.escape(HINTS[name])):
        run(name, **{"facebook/opt-125m": str(model)})
