"""Random models with a multi-token-prediction (MTP) layer, and what a plain computation drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch.nn import functional

NUM_LAYERS = 3
EXTRA = f"model.layers.{NUM_LAYERS}"  # the layer after the last
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = ["sparse", "dense", "sparse", "sparse"]  # the last one is the MTP layer


@dataclass(frozen=True)
class Parts:
    """Names of the tensors in a checkpoint, and how they are used."""

    layer: str = EXTRA
    embedding_norm: str = f"{EXTRA}.enorm"
    hidden_norm: str = f"{EXTRA}.hnorm"
    projection: str = f"{EXTRA}.eh_proj"
    norm: str = f"{EXTRA}.shared_head.norm"
    has_copies: bool = True  # of the embedding and the head
    hidden_first: bool = False
    passes_normed: bool = False
    norm_offset: float = 0.0  # weights are stored less this
    settings: tuple[tuple[str, list[str]], ...] = ()  # by layer


MIMO, QWEN = "model.mtp_layers.0", "mtp"
TARGETS: dict[str, Parts] = {
    "glm4_moe": Parts(),
    "deepseek_v3": Parts(),
    "glm4_moe_lite": Parts(settings=(("mlp_layer_types", KINDS),)),
    "mimo": Parts(
        MIMO,
        f"{MIMO}.token_layernorm",
        f"{MIMO}.hidden_layernorm",
        f"{MIMO}.input_proj",
        f"{MIMO}.final_layernorm",
        has_copies=False,
        hidden_first=True,
        passes_normed=True,
        settings=(("layer_types", ["full_attention"] * 4),),
    ),
    "qwen3_next": Parts(
        f"{QWEN}.layers.0",
        f"{QWEN}.pre_fc_norm_embedding",
        f"{QWEN}.pre_fc_norm_hidden",
        f"{QWEN}.fc",
        f"{QWEN}.norm",
        has_copies=False,
        passes_normed=True,
        norm_offset=1.0,
        settings=(("layer_types", [LINEAR, LINEAR, FULL, FULL]),),
    ),
}


def make_target(folder: Path, variant: str, **settings: Any) -> Path:
    """A model whose last layer becomes its MTP layer. Layers before it are the model's."""
    parts = TARGETS[variant]
    by_layer = {name: settings.get(name, kinds) for name, kinds in parts.settings}
    changes = {"num_hidden_layers": NUM_LAYERS + 1, "tie_word_embeddings": False, **by_layer}
    make_checkpoint(folder, variant, **{**settings, **changes})
    path = folder / "model.safetensors"
    tensors = {
        name.replace(f"{EXTRA}.", f"{parts.layer}."): tensor
        for name, tensor in load_file(path).items()
    }
    size = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(5)
    for name in (parts.embedding_norm, parts.hidden_norm, parts.norm):
        weight = 1 + 0.2 * torch.randn(size, generator=generator)
        tensors[f"{name}.weight"] = weight - parts.norm_offset
    projection = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    tensors[f"{parts.projection}.weight"] = projection
    if parts.has_copies:
        tensors[f"{EXTRA}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{EXTRA}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    if variant == "qwen3_next":  # whose files do not say so
        del config["num_nextn_predict_layers"]
    config |= {name: kinds[:NUM_LAYERS] for name, kinds in by_layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Plain:
    """transformers' model of one layer more, whose layers run one by one over the whole text."""

    def __init__(self, folder: Path, variant: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.parts = parts = TARGETS[variant]
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = NUM_LAYERS + 1
        for name, kinds in parts.settings:
            own = getattr(config, name)
            setattr(config, name, [*own, kinds[-1]])
        self.tensors = load_file(folder / "model.safetensors")
        whole = folder / "with one layer more"
        config.save_pretrained(whole)
        layer = f"{parts.layer}."
        renamed = {name.replace(layer, f"{EXTRA}."): each for name, each in self.tensors.items()}
        save_file(renamed, whole / "model.safetensors", metadata={"format": "pt"})
        self.model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
        self.eps = config.rms_norm_eps

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"] + self.parts.norm_offset
        return functional.rms_norm(x, x.shape[-1:], weight, self.eps)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        positions = torch.arange(len(x))[None]
        angles = inner.rotary_emb(x[None], positions)
        out = inner.layers[index](x[None], position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).view_as(x)

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        parts, embed = self.parts, self.model.get_input_embeddings()
        x = rows = embed(torch.tensor(token_ids))
        for index in range(NUM_LAYERS):
            x = self.layer(index, x)
        states = self.norm(x, "model.norm")
        before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        drafts: list[int] = []
        for _ in range(count):
            pair = [self.norm(rows, parts.embedding_norm), self.norm(before, parts.hidden_norm)]
            if parts.hidden_first:
                pair = pair[::-1]
            x = torch.cat(pair, dim=-1) @ self.tensors[f"{parts.projection}.weight"].T
            last = self.layer(NUM_LAYERS, x)[-1:]
            normed = self.norm(last, parts.norm)
            drafts.append(int((normed @ self.tensors["lm_head.weight"].T).argmax()))
            rows = torch.cat([rows, embed(torch.tensor(drafts[-1:]))])
            before = torch.cat([before, normed if parts.passes_normed else last])
        return drafts
