"""Random Medusa heads, and what a plain computation of them drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from drafters import Recording
from safetensors.torch import load_file, save_file
from torch.nn import functional

from penstock.runner.drafters.medusa import MedusaDrafter

NUM_HEADS, NUM_LAYERS = 3, 2
FORMATS = ("authors", "vllm", "vllm with few tokens", "the target's head")


def make_heads(folder: Path, target: Path, form: str = "authors", **changes: Any) -> Path:
    """Random heads for a target, in one of the formats."""
    target_config = json.loads((target / "config.json").read_text())
    size, vocab_size = target_config["hidden_size"], target_config["vocab_size"]
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors, num_tokens = {}, 80 if form == "vllm with few tokens" else vocab_size
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            name = f"blocks.{head}.layers.{layer}"
            if form == "authors":
                name = f"{head}.{layer}.linear"
                tensors[f"{name}.bias"] = rand(1, size)[0]
            tensors[f"{name}.weight"] = rand(size, size)
        name = f"{head}.{NUM_LAYERS}" if form == "authors" else f"lm_heads.{head}"
        tensors[f"{name}.weight"] = 4 * rand(num_tokens, size)
    config: dict[str, Any] = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_LAYERS}
    if form != "authors":
        config = {"architectures": ["MedusaModel"], "model_type": "medusa"}
        config |= {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_LAYERS}
        config |= {"hidden_size": size, "vocab_size": vocab_size}
    if form == "vllm with few tokens":
        tensors["token_map"] = torch.randperm(vocab_size, generator=generator)[:num_tokens]
        config["truncated_vocab_size"] = num_tokens
    if form == "the target's head":
        tensors = {name: each for name, each in tensors.items() if "lm_heads" not in name}
        config["original_lm_head"] = True
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


class Plain:
    """The heads on the last hidden state of transformers' target."""

    def __init__(self, target: Path, heads: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.tensors = load_file(heads / "medusa_lm_head.safetensors")

    def find(self, head: int, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        for name in (f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}"):
            if f"{name}.weight" in self.tensors:
                return self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        raise KeyError(head, layer)

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What the heads propose after these tokens, of which the last is not computed yet."""
        if len(token_ids) < 2:
            return []
        inner = self.target.model(torch.tensor([token_ids[:-1]]))
        state, drafts = inner.last_hidden_state[0, -1], []
        for head in range(count):
            x = state
            for layer in range(NUM_LAYERS):
                x = x + functional.silu(functional.linear(x, *self.find(head, layer)))
            names = (f"{head}.{NUM_LAYERS}.weight", f"lm_heads.{head}.weight")
            own = [self.tensors[name] for name in names if name in self.tensors]
            matrix = own[0] if own else self.target.lm_head.weight
            best = int((matrix @ x).argmax())
            token_map = self.tensors.get("token_map")
            drafts.append(best if token_map is None else int(token_map[best]))
        return drafts


class Watched(Recording, MedusaDrafter):
    pass
