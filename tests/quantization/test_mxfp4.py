"""GPT-OSS's experts stay in MXFP4: the published layout, against the floats it stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import make_floats
from safetensors.torch import load_file, save_file
from test_formats import EXACT, NATIVE, OPTIONS, own_logits, reference_logits, relative_error

from penstock import LLM
from penstock.layers.quantized.checkpoints import choose_quantization

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[experts, rows, columns] -> blocks [.., columns / 32, 16], scales, and what they mean."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).clamp_min(1e-9) / 6).log2().ceil()
    each = torch.exp2(exponent)[..., None]
    nearest = ((groups / each).abs()[..., None] - VALUES).abs().argmin(-1)
    codes = (nearest + 8 * (groups < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    meant = (VALUES[nearest] * groups.sign() * each).flatten(-2)
    return blocks, (exponent + 127).to(torch.uint8), meant


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mxfp4")
    floats = make_floats(folder / "floats", "gpt_oss", hidden_size=64, intermediate_size=64)
    quantized, restored = folder / "quantized", folder / "restored"
    stored, meant = {}, {}
    for name, tensor in load_file(floats / "model.safetensors").items():
        meant[name] = tensor.float()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # Plain checkpoints have them transposed.
            blocks, scales, values = to_mxfp4(tensor.float().transpose(-1, -2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = values.transpose(-1, -2).contiguous()
        else:
            stored[name] = tensor
    for target, tensors in ((quantized, stored), (restored, meant)):
        shutil.copytree(floats, target)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    raw = json.loads((quantized / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (quantized / "config.json").write_text(json.dumps(raw))
    return quantized, restored


def test_logits_are_those_of_the_floats(folders: tuple[Path, Path]) -> None:
    quantized, restored = folders
    expected = reference_logits(restored)
    assert relative_error(own_logits(quantized, cpu_backend="torch"), expected) < EXACT
    assert relative_error(own_logits(quantized), expected) < NATIVE


def test_weights_stay_packed(folders: tuple[Path, Path]) -> None:
    with LLM(str(folders[0]), cpu_backend="torch", **OPTIONS) as llm:
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        experts = [b for name, b in model.named_buffers() if "experts" in name]
        assert {tensor.dtype for tensor in experts} == {torch.uint8}


def test_ranks_that_would_cut_a_group_unpack() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 2880}
    assert choose_quantization(config, None, 2) is not None
    assert choose_quantization(config, None, 4) is None
