"""`penstock quantize` of pooling models: files beside the weights, and heads, are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import make_encoder
from tiny_engine import open_llm, random_prompts

from penstock import PoolingParams
from penstock.cli.main import main

PROMPTS = random_prompts(3, 5, 17, 30)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def vectors(folder: Path, **params: Any) -> list[dict[str, Any]]:
    with open_llm(folder, cpu_backend="torch") as llm:
        outputs = llm.encode(PROMPTS, PoolingParams(**params), use_tqdm=False)
    return [output.outputs.vectors or {"whole": output.outputs.data} for output in outputs]


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_all_modules_of_a_sentence_transformer_are_written(
    tmp_path: Path, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_encoder(model / inner, "bert")
    kinds = {inner: "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_N": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    write(model / "modules.json", modules)
    write(model / "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    write(model / "2_Dense/config.json", {"in_features": 64, "out_features": 16, "bias": False})
    torch.manual_seed(0)
    save_file({"linear.weight": torch.randn(16, 64)}, model / "2_Dense/model.safetensors")
    write(model / "config_sentence_transformers.json", {"prompts": {"query": "q "}})
    # As bge-m3 has them, in both formats.
    heads = {"weight": torch.randn(1, 64), "bias": torch.randn(1)}
    torch.save(heads, model / inner / "sparse_linear.pt")
    save_file(
        {"weight": torch.randn(8, 64), "bias": torch.randn(8)},
        model / inner / "colbert_linear.safetensors",
    )

    assert main(["quantize", str(model), str(out), "--method", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "no perplexity is measured: this is a pooling model" in printed
    before, after = (
        {str(path.relative_to(root)) for path in root.rglob("*")} for root in (model, out)
    )
    assert after == before - {"3_N"}  # which holds nothing
    tensors = load_file(out / inner / "model.safetensors")
    assert tensors["encoder.layer.0.attention.self.query.weight"].dtype == torch.int8
    names = ["dense", "sparse", "colbert"]
    for found, wanted in zip(
        vectors(out, vectors=names), vectors(model, vectors=names), strict=True
    ):
        assert found["dense"].shape == (16,)
        assert found["dense"] @ wanted["dense"] > 0.98
        assert found["colbert"].shape == wanted["colbert"].shape
        assert found["sparse"]


def test_classifiers_stay_floats(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_encoder(model, "bert", "ForSequenceClassification")
    assert main(["quantize", str(model), str(out), "--method", "int8", "--no-perplexity"]) == 0
    floats, written = (load_file(path / "model.safetensors") for path in (model, out))
    for name in ("classifier.weight", "bert.pooler.dense.weight"):
        assert torch.equal(floats[name], written[name])
    for found, wanted in zip(vectors(out), vectors(model), strict=True):
        np.testing.assert_allclose(found["whole"], wanted["whole"], atol=0.1)


def test_pooling_models_are_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    make_encoder(model, "bert")
    text.write_text("some text")
    flags = ["--method", "int8", "--calibration-text", str(text)]
    assert main(["quantize", str(model), str(tmp_path / "out"), *flags]) == 2
    assert "--calibration-text is for models that generate text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
