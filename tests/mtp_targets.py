"""Random models with multi-token-prediction (MTP) layers, and what a plain computation drafts."""

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
EXTRA = "model.layers.{index}"  # counted on from the model's
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = ["sparse", "dense", "sparse", "sparse"]  # the last one is the MTP layer


@dataclass(frozen=True)
class Parts:
    """Names of the tensors in a checkpoint, by the layer's index, and how they are used."""

    layer: str = EXTRA
    embedding_norm: str = EXTRA + ".enorm"
    hidden_norm: str = EXTRA + ".hnorm"
    projection: str = EXTRA + ".eh_proj"
    norm: str = EXTRA + ".shared_head.norm"
    has_copies: bool = True  # of the embedding and the head
    hidden_first: bool = False
    passes_normed: bool = False
    norm_offset: float = 0.0  # weights are stored less this
    settings: tuple[tuple[str, list[str]], ...] = ()  # by layer


MIMO, QWEN = "model.mtp_layers.{depth}", "mtp"
TARGETS: dict[str, Parts] = {
    "glm4_moe": Parts(),
    "deepseek_v3": Parts(),
    "glm4_moe_lite": Parts(settings=(("mlp_layer_types", KINDS),)),
    "mimo": Parts(
        MIMO,
        MIMO + ".token_layernorm",
        MIMO + ".hidden_layernorm",
        MIMO + ".input_proj",
        MIMO + ".final_layernorm",
        has_copies=False,
        hidden_first=True,
        passes_normed=True,
        settings=(("layer_types", ["full_attention"] * 4),),
    ),
    "qwen3_next": Parts(
        QWEN + ".layers.{depth}",
        QWEN + ".pre_fc_norm_embedding",
        QWEN + ".pre_fc_norm_hidden",
        QWEN + ".fc",
        QWEN + ".norm",
        has_copies=False,
        passes_normed=True,
        norm_offset=1.0,
        settings=(("layer_types", [LINEAR, LINEAR, FULL, FULL]),),
    ),
}


def names_of(parts: Parts, depth: int) -> dict[str, str]:
    """The names of a layer's parts."""
    found = (parts.layer, parts.embedding_norm, parts.hidden_norm, parts.projection, parts.norm)
    names = ("layer", "embedding_norm", "hidden_norm", "projection", "norm")
    own = (name.format(index=NUM_LAYERS + depth, depth=depth) for name in found)
    return dict(zip(names, own, strict=True))


def make_target(folder: Path, variant: str, num_mtp_layers: int = 1, **settings: Any) -> Path:
    """A model whose last layers become its MTP layers. Layers before them are the model's."""
    parts = TARGETS[variant]
    by_layer = {name: settings.get(name, kinds) for name, kinds in parts.settings}
    longer = {name: kinds + kinds[-1:] * (num_mtp_layers - 1) for name, kinds in by_layer.items()}
    num_layers = NUM_LAYERS + num_mtp_layers
    changes = {"num_hidden_layers": num_layers, "tie_word_embeddings": False, **longer}
    make_checkpoint(folder, variant, **{**settings, **changes})
    path = folder / "model.safetensors"
    tensors = load_file(path)
    size = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(5)
    for depth in range(num_mtp_layers):
        extra, own = EXTRA.format(index=NUM_LAYERS + depth), names_of(parts, depth)
        tensors = {
            name.replace(f"{extra}.", f"{own['layer']}."): tensor
            for name, tensor in tensors.items()
        }
        for name in ("embedding_norm", "hidden_norm", "norm"):
            weight = 1 + 0.2 * torch.randn(size, generator=generator)
            tensors[f"{own[name]}.weight"] = weight - parts.norm_offset
        projection = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
        tensors[f"{own['projection']}.weight"] = projection
        if parts.has_copies:
            tensors[f"{extra}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{extra}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": num_mtp_layers}
    if variant == "qwen3_next" and num_mtp_layers == 1:  # whose files do not say so
        del config["num_nextn_predict_layers"]
    config |= {name: kinds[:NUM_LAYERS] for name, kinds in by_layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Plain:
    """transformers' model with further layers, which run one by one over the whole text."""

    def __init__(self, folder: Path, variant: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.parts = parts = TARGETS[variant]
        raw = json.loads((folder / "config.json").read_text())
        self.num_mtp_layers = raw.get("num_nextn_predict_layers", 1)
        config = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = NUM_LAYERS + self.num_mtp_layers
        for name, kinds in parts.settings:
            own = getattr(config, name)
            setattr(config, name, [*own, *kinds[-1:] * self.num_mtp_layers])
        self.tensors = load_file(folder / "model.safetensors")
        whole = folder / "with more layers"
        config.save_pretrained(whole)
        renamed = self.tensors
        for depth in range(self.num_mtp_layers):
            layer = f"{names_of(parts, depth)['layer']}."
            extra = f"{EXTRA.format(index=NUM_LAYERS + depth)}."
            renamed = {name.replace(layer, extra): each for name, each in renamed.items()}
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

    def mtp_layer(
        self, depth: int, rows: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that tokens are chosen from, and those that further rows take."""
        own = names_of(self.parts, depth)
        pair = [self.norm(rows, own["embedding_norm"]), self.norm(before, own["hidden_norm"])]
        if self.parts.hidden_first:
            pair = pair[::-1]
        x = torch.cat(pair, dim=-1) @ self.tensors[f"{own['projection']}.weight"].T
        out = self.layer(NUM_LAYERS + depth, x)
        normed = self.norm(out, own["norm"])
        return normed, normed if self.parts.passes_normed else out

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        embed, num = self.model.get_input_embeddings(), self.num_mtp_layers
        x = rows = embed(torch.tensor(token_ids))
        for index in range(NUM_LAYERS):
            x = self.layer(index, x)
        passed, befores = self.norm(x, "model.norm"), []
        for depth in range(num):
            befores.append(torch.cat([torch.zeros_like(passed[:1]), passed[:-1]]))
            _, passed = self.mtp_layer(depth, rows, befores[-1])
        drafts: list[int] = []
        for step in range(count):
            made = [self.mtp_layer(depth, rows, before) for depth, before in enumerate(befores)]
            state = made[step % num][0][-1]
            drafts.append(int((self.tensors["lm_head.weight"] @ state).argmax()))
            rows = torch.cat([rows, embed(torch.tensor(drafts[-1:]))])
            befores = [
                torch.cat([before, made[depth - 1][1][-1:]]) for depth, before in enumerate(befores)
            ]
        return drafts
