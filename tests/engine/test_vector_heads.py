"""bge-m3: dense, sparse and ColBERT vectors of one request, by the published formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_encoders import make_encoder
from tiny_engine import open_llm
from tiny_models import make_checkpoint

from penstock import LLM, PoolingParams
from penstock.protocol.errors import InputError, ModelError

ALL = ["dense", "sparse", "colbert"]
# The tokens around a text (0, 2), a token twice, one that is unknown (1).
PROMPTS = [[0, 17, 2], [0, 5, 9, 5, 200, 1, 9, 77, 2], [0, *range(30, 90), 2], [0, 2]]
UNWEIGHTED = {0, 1, 2, 3}


def layers(hidden_size: int) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return {
        "sparse_linear": {"weight": torch.randn(1, hidden_size), "bias": torch.randn(1)},
        "colbert_linear": {"weight": torch.randn(24, hidden_size), "bias": torch.randn(24)},
    }


def write_layers(folder: Path, hidden_size: int, pickled: bool = False) -> None:
    for stem, tensors in layers(hidden_size).items():
        if pickled:
            torch.save(tensors, folder / f"{stem}.pt")
        else:
            save_file(tensors, folder / f"{stem}.safetensors")


@pytest.fixture(params=[False, True], ids=["safetensors", "pickled"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """XLM-RoBERTa with sentence-transformers' files and the two layers."""
    make_encoder(tmp_path, "xlm_roberta")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 2, "unk_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    write_layers(tmp_path, 64, request.param)
    return tmp_path


@torch.inference_mode()
def reference(
    folder: Path, token_ids: list[int]
) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
    """The model's formulas: the first state; the largest weight of a token; the other states."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = model(torch.tensor([token_ids])).last_hidden_state[0]
    of = layers(states.shape[1])
    weights = torch.relu(
        states @ of["sparse_linear"]["weight"].T + of["sparse_linear"]["bias"]
    ).flatten()
    sparse: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights.tolist(), strict=True):
        if token_id not in UNWEIGHTED and weight > max(sparse.get(token_id, 0.0), 0.0):
            sparse[token_id] = weight
    colbert = states[1:] @ of["colbert_linear"]["weight"].T + of["colbert_linear"]["bias"]
    normalize = torch.nn.functional.normalize
    return normalize(states[0], dim=0), sparse, normalize(colbert, dim=-1)


def encode(llm: LLM, prompts: list[list[int]], **params: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.encode(inputs, PoolingParams(**params), use_tqdm=False)


def assert_sparse(found: dict[int, float], expected: dict[int, float]) -> None:
    assert list(found) == sorted(expected)
    assert found == pytest.approx(expected, abs=1e-4)


def test_one_request_gives_all_three_vectors_alone_and_batched(folder: Path) -> None:
    with open_llm(folder) as llm:
        batched = encode(llm, PROMPTS, vectors=ALL)
        alone = [encode(llm, [prompt], vectors=ALL)[0] for prompt in PROMPTS]
    for prompt, *outputs in zip(PROMPTS, batched, alone, strict=True):
        dense, sparse, colbert = reference(folder, prompt)
        for output in outputs:
            found = output.outputs.vectors
            assert list(found) == ALL
            np.testing.assert_allclose(output.outputs.data, dense, atol=1e-4)
            np.testing.assert_allclose(found["dense"], dense, atol=1e-4)
            assert_sparse(found["sparse"], sparse)
            np.testing.assert_allclose(found["colbert"], colbert, atol=1e-4)
    assert len(batched[1].outputs.vectors["sparse"]) > 0, "a test of nothing"


def test_vectors_that_are_not_asked_for_are_not_returned(folder: Path) -> None:
    with open_llm(folder) as llm:
        (plain,) = encode(llm, PROMPTS[1:2])
        (sparse,) = encode(llm, PROMPTS[1:2], vectors=["sparse", "sparse"])
        (raw,) = encode(llm, PROMPTS[1:2], vectors=["colbert"], use_activation=False)
        by_token = encode(llm, PROMPTS[1:2], task="token_embed")[0].outputs.data
        with pytest.raises(InputError, match="vectors is for task 'embed'"):
            encode(llm, PROMPTS[:1], task="token_embed", vectors=["sparse"])
    assert plain.outputs.vectors == {}
    assert_sparse(sparse.outputs.vectors["sparse"], reference(folder, PROMPTS[1])[1])
    assert list(sparse.outputs.vectors) == ["sparse"]
    assert by_token.shape == (len(PROMPTS[1]), 64)
    norms = np.linalg.norm(raw.outputs.vectors["colbert"], axis=1)
    assert np.abs(norms - 1).max() > 0.1, "they are not normalized"


@pytest.mark.parametrize("step_tokens", [1, 7, 2048])
def test_vectors_of_chunked_prompts_are_those_of_whole_ones(
    tmp_path: Path, step_tokens: int
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_layers(tmp_path, config["hidden_size"])
    options = {"runner": "pooling", "max_num_batched_tokens": step_tokens, "max_model_len": 64}
    with open_llm(tmp_path, **options) as llm:
        for _ in range(2):  # a cached prefix has no states
            outputs = encode(llm, PROMPTS, vectors=["sparse", "colbert"])
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                _, sparse, colbert = reference(tmp_path, prompt)
                assert_sparse(output.outputs.vectors["sparse"], sparse)
                np.testing.assert_allclose(output.outputs.vectors["colbert"], colbert, atol=1e-4)


def test_a_model_without_these_layers_refuses_them(tmp_path: Path) -> None:
    make_encoder(tmp_path, "xlm_roberta")
    with open_llm(tmp_path) as llm:
        assert encode(llm, PROMPTS[:1], vectors=["dense"])[0].outputs.vectors["dense"].shape == (
            64,
        )
        with pytest.raises(InputError, match="this model has no sparse vectors, only dense"):
            encode(llm, PROMPTS[:1], vectors=["sparse"])


@pytest.mark.parametrize("names", [[], ["wide"], "sparse", [1], [["sparse"]]])
def test_names_of_vectors_are_checked(names: Any) -> None:
    with pytest.raises(InputError, match="vectors must be a list of dense, sparse, colbert"):
        PoolingParams(vectors=names)


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.ones(1, 8), "bias": torch.ones(1)}, "must contain a weight of"),
        ({"weight": torch.ones(2, 64), "bias": torch.ones(2)}, "must contain a weight of"),
        ({"weight": torch.ones(1, 64)}, "must contain a weight of"),
        ({"weight": 3, "bias": torch.ones(1)}, "must contain a weight of"),
        ([torch.ones(1)], "must contain tensors by name"),
        (Foreign(), "cannot be read"),
    ],
)
def test_a_pickle_that_is_not_such_a_layer_is_refused_by_name(
    tmp_path: Path, content: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make_encoder(tmp_path, "xlm_roberta")
    torch.save(content, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelError, match=rf"sparse_linear\.pt: {message}"):
        open_llm(tmp_path)
    assert "unpickled" not in capfd.readouterr().out


def test_a_broken_pickle_is_refused_by_name(tmp_path: Path) -> None:
    make_encoder(tmp_path, "xlm_roberta")
    (tmp_path / "colbert_linear.pt").write_bytes(b"not a pickle")
    with pytest.raises(ModelError, match=r"colbert_linear\.pt: cannot be read"):
        open_llm(tmp_path)


def test_weights_that_are_no_numbers_fail_their_request_alone(folder: Path) -> None:
    tensors = layers(64)["colbert_linear"]
    tensors["weight"][0] = float("nan")
    for path in folder.glob("colbert_linear.*"):
        path.unlink()
    save_file(tensors, folder / "colbert_linear.safetensors")
    with open_llm(folder) as llm:
        (bad,) = encode(llm, PROMPTS[:1], vectors=ALL)
        (good,) = encode(llm, PROMPTS[:1], vectors=["dense", "sparse"])
    assert bad.error is not None
    assert (bad.outputs.data, bad.outputs.vectors) == (None, {})
    assert good.error is None
