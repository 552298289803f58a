"""Dense, sparse and ColBERT vectors through the pooling endpoints."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from server_process import DUMMY, ServerProcess, make_tiny_model

from penstock import LLM, PoolingParams

TEXTS = ["a text with some letters twice", "b"]
ALL = ["dense", "sparse", "colbert"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("vectors"))
    torch.manual_seed(2)
    for name, size in (("sparse", 1), ("colbert", 12)):
        tensors = {"weight": torch.randn(size, 32), "bias": torch.randn(size)}
        save_file(tensors, folder / f"{name}_linear.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(folder), *DUMMY, "--runner", "pooling") as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[str, Any]]:
    options = {"load_format": "dummy", "cpu_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    with LLM(str(folder), runner="pooling", log_level="error", **options) as llm:
        outputs = llm.encode(TEXTS, PoolingParams(vectors=ALL), use_tqdm=False)
    assert len(outputs[0].outputs.vectors["sparse"]) > 1
    return [output.outputs.vectors for output in outputs]


def post(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    data: list[dict[str, Any]] = response.json()["data"]
    return data


def assert_sparse(found: dict[str, Any], wanted: dict[int, float]) -> None:
    assert found["token_ids"] == list(wanted)
    assert found["weights"] == pytest.approx(list(wanted.values()), abs=1e-5)


def test_pooling_returns_the_vectors_by_name(
    server: ServerProcess, expected: list[dict[str, Any]]
) -> None:
    for item, wanted in zip(
        post(server, "/pooling", input=TEXTS, vectors=ALL), expected, strict=True
    ):
        found = item["data"]
        assert list(found) == ALL
        np.testing.assert_allclose(found["dense"], wanted["dense"], atol=1e-5)
        colbert = np.array(found["colbert"]).reshape(-1, 12)
        np.testing.assert_allclose(colbert, wanted["colbert"], atol=1e-5)
        assert_sparse(found["sparse"], wanted["sparse"])
    (one,) = post(server, "/pooling", input=TEXTS[0], vectors=["sparse"])
    assert list(one["data"]) == ["sparse"]


def test_embeddings_have_the_other_vectors_beside_them(
    server: ServerProcess, expected: list[dict[str, Any]]
) -> None:
    (plain,) = post(server, "/v1/embeddings", input=TEXTS[0])
    assert set(plain) == {"object", "index", "embedding"}
    (item,) = post(server, "/v1/embeddings", input=TEXTS[0], vectors=ALL, encoding_format="base64")
    dense = np.frombuffer(base64.b64decode(item["embedding"]), np.float32)
    np.testing.assert_allclose(dense, expected[0]["dense"], atol=1e-5)
    colbert = np.frombuffer(base64.b64decode(item["colbert"]), np.float32).reshape(-1, 12)
    np.testing.assert_allclose(colbert, expected[0]["colbert"], atol=1e-5)
    assert_sparse(item["sparse"], expected[0]["sparse"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"vectors": ["wide"]}, "dense"),
        ({"vectors": []}, "must be a list of dense, sparse, colbert"),
        ({"vectors": ["sparse"], "task": "token_embed"}, "vectors is for task 'embed'"),
    ],
)
def test_what_is_wrong_with_vectors_is_said(
    server: ServerProcess, body: dict[str, Any], words: str
) -> None:
    response = server.post("/pooling", {"input": "a", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith("vectors")
    assert words in error["message"]
