"""Servers that have no adapters, may load none, or have them for another kind of model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_requests import LORA, error_of, load
from safetensors.numpy import load_file, save_file
from server_process import SMALL, ServerProcess, environment
from tiny_adapters import write_adapter, write_adapters

from penstock.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


def test_a_server_without_adapters_says_how_to_get_them(
    serve_tiny: Callable[..., ServerProcess], folder: Path
) -> None:
    server = serve_tiny("--admin-api-key", "admin-key", "--served-model-name", "tiny")
    assert "--enable-lora" in error_of(load(server, "a", folder / "a"))[0]
    error_of(server.post("/v1/completions", {"model": "a", "prompt": "x"}), 404)


def test_without_an_admin_key_nothing_is_loaded_unless_allowed(
    serve_tiny: Callable[..., ServerProcess], folder: Path
) -> None:
    server = serve_tiny("--enable-lora")
    assert "--admin-api-key" in error_of(load(server, "a", folder / "a"))[0]
    server = serve_tiny("--enable-lora", "--allow-runtime-lora-updating")
    assert "from nowhere" in error_of(load(server, "a", folder / "a"))[0]


def test_the_models_name_chooses_the_classifier_that_an_adapter_has(
    serve_tiny: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    for name, rows in {"even": [0.0, 0.0, 0.0], "last": [-9.0, 0.0, 9.0]}.items():
        file = write_adapter(tmp_path / name, 0) / "adapter_model.safetensors"
        whole = np.array(rows, dtype=np.float32)[:, None] * np.ones((1, 32), dtype=np.float32)
        save_file({**load_file(file), "base_model.model.score.weight": whole}, file)
    overrides = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    server = serve_tiny(
        *("--hf-overrides", json.dumps(overrides), "--enable-lora", "--served-model-name", "tiny"),
        *("--lora-modules", f"even={tmp_path / 'even'}", f"last={tmp_path / 'last'}"),
    )

    def probs(model: str) -> list[float]:
        reply = server.post("/classify", {"model": model, "input": "Hello"}).json()
        found: list[float] = reply["data"][0]["probs"]
        return found

    assert probs("even") == pytest.approx([1 / 3] * 3)
    first, middle, last = probs("last")
    assert middle**2 == pytest.approx(first * last, rel=1e-3, abs=1e-6)
    assert probs("tiny") != probs("even")


def test_the_models_name_chooses_the_adapter_of_a_pooling_model(
    serve_tiny: Callable[..., ServerProcess], folder: Path
) -> None:
    server = serve_tiny(
        *("--runner", "pooling", "--enable-lora", "--served-model-name", "tiny"),
        *("--lora-modules", f"a={folder / 'a'}", f"b={folder / 'b'}"),
    )
    routes: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
        "/v1/embeddings": ({"input": "Hello"}, lambda r: r["data"][0]["embedding"]),
        "/pooling": ({"input": "Hello"}, lambda r: r["data"][0]["data"]),
        "/score": ({"text_1": "Hello", "text_2": "you"}, lambda r: r["data"][0]["score"]),
        "/rerank": (
            {"query": "Hello", "documents": ["you"]},
            lambda r: r["results"][0]["relevance_score"],
        ),
        "/v2/embed": ({"texts": ["Hello"]}, lambda r: r["embeddings"]["float"][0]),
    }
    for path, (body, result_of) in routes.items():
        found = []
        for model in ("tiny", "a", "b"):
            reply = server.post(path, {**body, "model": model}).json()
            assert reply.get("model", model) == model
            found.append(json.dumps(result_of(reply)))
        assert len(set(found)) == 3, path
        assert server.post(path, {**body, "model": "nothing"}).status_code == 404


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--lora-modules", "a=/nowhere"), "lora_modules needs enable_lora"),
        (("--enable-lora", "--lora-modules", "a"), "must be name=path"),
        (("--enable-lora", "--lora-modules", "a=x", "a=y"), "'a' twice"),
        (("--enable-lora", "--lora-modules", '{"name": "a"}'), "name=path or JSON"),
        (("--enable-lora", "--allowed-lora-paths", "/nowhere"), "which is no folder"),
        (("--enable-lora", "--lora-resolver", "pypi:*"), "lora_resolver takes folders"),
    ],
)
def test_options_that_cannot_work_end_the_start(
    tiny_model: Path, flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_model), "--port", "0", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_an_adapter_that_cannot_be_loaded_ends_the_start(tiny_model: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "penstock", "serve", str(tiny_model), "--port", "0", *LORA]
    command += [*SMALL, "--max-lora-rank", "2", "--lora-modules", f"a={folder / 'a'}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment({}))
    assert ended.returncode != 0
    assert "lora_modules: 'a': " in ended.stderr
    assert "rank" in ended.stderr
