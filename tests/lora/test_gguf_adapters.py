"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from adapters import MakeAdapter, MakeCheckpoint, make_adapter
from gguf_builder import permute_rope
from safetensors.torch import load_file

from penstock.config import LoadConfig, ModelConfig
from penstock.layers.build import Build
from penstock.layers.lora import PartDelta
from penstock.loading.adapters.deltas import AdapterDeltas
from penstock.loading.adapters.read import read_deltas
from penstock.loading.adapters.source import adapter_digest, locate_adapter
from penstock.loading.source import resolve_source
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import AdapterError

STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(module: str) -> str:
    if module in ("lm_head", "model.embed_tokens"):
        return "output" if module == "lm_head" else "token_embd"
    _, _, layer, stem = module.split(".", 3)
    return f"blk.{layer}.{STEMS[stem]}"


def convert(
    adapter: Path, out: Path, arch: str, heads: dict[str, int] | None = None, **metadata: Any
) -> Path:
    """An adapter in GGUF. `heads` are those of q and k whose rows llama's converter permutes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, arch)
    kept = {"general.type": "adapter", "adapter.type": "lora"} | metadata
    for key, value in kept.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        if name.endswith("base_layer.weight"):
            continue
        own = name.removeprefix("base_model.model.")
        module, _, kind = own.replace(".lora_embedding_", ".lora_").partition(".lora_")
        data, letter = tensor.numpy(), kind[0].lower()
        if module == "model.embed_tokens" and letter == "a":
            data = data.T
        stem = module.rpartition(".")[2]
        if letter == "b" and heads and stem in heads:
            data = permute_rope(data, heads[stem])
        writer.add_tensor(f"{gguf_name(module)}.weight.lora_{letter}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def read(path: Path, checkpoint: Path) -> AdapterDeltas:
    source = resolve_source(ModelConfig(model=str(checkpoint)), LoadConfig())
    build = Build(torch.float32, torch.device("meta"), 512, Ops("cpu"))
    return read_deltas(path, build_model(source.config, build), 64, torch.float32)


def assert_same(ours: dict[Any, PartDelta], theirs: dict[Any, PartDelta]) -> None:
    assert ours.keys() == theirs.keys()
    for place, delta in theirs.items():
        assert torch.equal(ours[place].a, delta.a), place
        assert torch.equal(ours[place].b, delta.b), place


def test_a_gguf_adapter_of_llama_is_read_like_peft_s(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    heads = {"q_proj": 4, "k_proj": 2}
    path = convert(adapter_of("all_linear"), tmp_path / "lora.gguf", "llama", heads)
    ours = read(path, checkpoint_of("llama"))
    theirs = read(adapter_of("all_linear"), checkpoint_of("llama"))
    assert len(ours.linear) == 21
    assert_same(ours.linear, theirs.linear)


def test_a_gguf_adapter_may_change_the_embedding_and_the_head(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    path = convert(adapter_of("embedding_and_head"), tmp_path / "l.gguf", "llama", {"q_proj": 4})
    ours = read(path, checkpoint_of("llama"))
    theirs = read(adapter_of("embedding_and_head"), checkpoint_of("llama"))
    assert ours.embedding.keys() == {"model.embed_tokens", "lm_head"}
    assert_same(ours.embedding, theirs.embedding)


def test_a_gguf_adapter_of_qwen_has_its_rows_in_order(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    path = convert(adapter_of("up_alone"), tmp_path / "lora.gguf", "qwen3")
    theirs = read(adapter_of("up_alone"), checkpoint_of("qwen3"))
    assert_same(read(path, checkpoint_of("qwen3")).linear, theirs.linear)


def test_a_gguf_file_is_found_alone_or_in_its_folder(
    adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    path = convert(adapter_of("all_linear"), tmp_path / "lora.gguf", "llama")
    assert locate_adapter(str(path)) == path
    assert locate_adapter(str(tmp_path)) == tmp_path
    assert adapter_digest(path) == adapter_digest(tmp_path)
    assert adapter_digest(path) != adapter_digest(adapter_of("all_linear"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "general.type must be 'adapter'"),
        ({"adapter.type": "control_vector"}, "adapter.type must be 'lora'"),
    ],
)
def test_other_gguf_files_are_no_adapters(
    metadata: dict[str, str],
    message: str,
    checkpoint_of: MakeCheckpoint,
    adapter_of: MakeAdapter,
    tmp_path: Path,
) -> None:
    path = convert(adapter_of("q_and_v"), tmp_path / "lora.gguf", "llama", **metadata)
    with pytest.raises(AdapterError, match=message):
        read(path, checkpoint_of("llama"))


def test_a_gguf_adapter_of_a_deeper_model_is_refused(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    from tiny_models import make_checkpoint

    deeper = make_checkpoint(tmp_path / "deeper", "llama", num_hidden_layers=5)
    adapter = make_adapter(tmp_path / "adapter", deeper, target_modules=["v_proj"])
    path = convert(adapter, tmp_path / "lora.gguf", "llama")
    with pytest.raises(AdapterError, match=r"blk\.3\.attn_v\.weight, which the model does not"):
        read(path, checkpoint_of("llama"))


def test_a_truncated_gguf_adapter_is_refused(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    path = convert(adapter_of("q_and_v"), tmp_path / "lora.gguf", "llama")
    whole = path.read_bytes()
    for size in (0, 3, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(AdapterError, match=r"lora\.gguf"):
            read(path, checkpoint_of("llama"))
