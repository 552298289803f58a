"""Random EAGLE-3 heads, and what a plain computation of them drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from drafters import Recording
from safetensors.torch import save_file
from torch.nn import functional

from penstock.runner.drafters.eagle3 import Eagle3Drafter

Tensors = Mapping[str, torch.Tensor]
AUX = [0, 1]


def make_head(
    folder: Path,
    target: Path,
    speculators: bool = False,
    num_tokens: int | None = 96,
    embeds: bool = False,
    **changes: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random head that drafts `num_tokens` of the target's tokens. None: with its output head.

    With `embeds` it has an embedding of its own. Its tensors are returned under the names of the
    EAGLE authors.
    """
    settings = json.loads((target / "config.json").read_text())
    size, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv = settings.get("num_key_value_heads", heads)
    head_dim = settings.get("head_dim") or size // heads
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    inner = settings["intermediate_size"]
    aux = changes.get("eagle_aux_hidden_state_layer_ids", AUX)
    vocab_size = settings["vocab_size"]
    tensors = {
        "fc.weight": rand(size, len(aux) * size),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": 2 * rand(heads * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": 2 * rand(kv * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": rand(kv * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": rand(size, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": rand(inner, size),
        "midlayer.mlp.up_proj.weight": rand(inner, size),
        "midlayer.mlp.down_proj.weight": rand(size, inner),
        "norm.weight": norm(),
    }
    if num_tokens is not None:
        chosen = torch.randperm(vocab_size, generator=generator)[:num_tokens].sort().values
        tensors["lm_head.weight"] = 4 * rand(num_tokens, size)
        tensors["d2t"] = chosen - torch.arange(num_tokens)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    if embeds:
        tensors["embed_tokens.weight"] = rand(vocab_size, size)
    layer = {**settings, "num_hidden_layers": 1, "max_position_embeddings": 16}
    own = {
        "draft_vocab_size": num_tokens or vocab_size,
        "eagle_aux_hidden_state_layer_ids": aux,
        **changes,
    }
    stored = dict(tensors)
    if speculators:
        own = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **own}
        own["transformer_layer_config"] = layer
        stored = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    else:
        own = {**layer, "architectures": ["LlamaForCausalLMEagle3"], **own}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own))
    save_file(stored, folder / "model.safetensors")
    return folder, tensors


def make_eagle(
    folder: Path, target: Path, extras: bool = False, speculators: bool = False, **changes: Any
) -> Path:
    """A random head of the first EAGLE.

    `extras`: biases, a last norm, an embedding and an output head, which some have.
    """
    settings = json.loads((target / "config.json").read_text())
    size, heads = settings["hidden_size"], settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or size // heads
    queries, kv = heads * head_dim, settings.get("num_key_value_heads", heads) * head_dim
    inner = settings["intermediate_size"]
    generator = torch.Generator().manual_seed(6)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {
        "fc.weight": rand(size, 2 * size),
        "layers.0.self_attn.q_proj.weight": 2 * rand(queries, size),
        "layers.0.self_attn.k_proj.weight": 2 * rand(kv, size),
        "layers.0.self_attn.v_proj.weight": rand(kv, size),
        "layers.0.self_attn.o_proj.weight": rand(size, queries),
        "layers.0.post_attention_layernorm.weight": 1 + 0.2 * rand(1, size)[0],
        "layers.0.mlp.gate_proj.weight": rand(inner, size),
        "layers.0.mlp.up_proj.weight": rand(inner, size),
        "layers.0.mlp.down_proj.weight": rand(size, inner),
    }
    if extras:
        tensors["embed_tokens.weight"] = rand(settings["vocab_size"], size)
        tensors["lm_head.weight"] = 4 * rand(settings["vocab_size"], size)
        tensors["fc.bias"] = rand(1, size)[0]
        for name, rows in (("q", queries), ("k", kv), ("v", kv)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = rand(1, rows)[0]
        tensors["norm.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
        tensors["layers.0.input_layernorm.weight"] = torch.ones(size)
    own = {**settings, "num_hidden_layers": 1, "max_position_embeddings": 16}
    if speculators:
        own = {"transformer_layer_config": own, "speculators_model_type": "eagle"}
        own |= {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"]}
        own |= {"fusion_bias": extras, "layernorms": False}
        tensors = {
            name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
            for name, tensor in tensors.items()
            if "input_layernorm" not in name
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**own, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


# -- the same computation, plainly


class PlainHead:
    """A head over a whole text at once, in torch. The target is transformers'."""

    layer: str  # prefix of the layer's tensors

    def __init__(self, target: Path, head: Tensors) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config, self.head = self.target.config, head

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What the head proposes behind these tokens, greedily."""
        ids = torch.tensor([token_ids])
        combined = self.combine(self.target.model(ids, output_hidden_states=True).hidden_states)
        before = torch.cat([torch.zeros_like(combined[:1]), combined[:-1]])
        rows = self.embed(ids[0])
        drafts: list[int] = []
        for _ in range(count):
            states, last = self.compute(rows, before)
            drafts.append(self.choose(states[-1]))
            rows = torch.cat([rows, self.embed(torch.tensor(drafts[-1:]))])
            before = torch.cat([before, last[-1:]])
        return drafts

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        given = self.target.get_input_embeddings().weight
        return functional.embedding(ids, self.head.get("embed_tokens.weight", given))

    def best(self, state: torch.Tensor) -> int:
        """The token of the largest logit, in the head's own numbering."""
        weight = self.head.get("lm_head.weight", self.target.lm_head.weight)
        return int((weight @ state).argmax())

    def combine(self, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What rows take of the target's hidden states, of which the last is behind its norm."""
        raise NotImplementedError

    def compute(
        self, rows: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that tokens are chosen from, and those that further rows take."""
        raise NotImplementedError

    def choose(self, state: torch.Tensor) -> int:
        raise NotImplementedError

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.head[f"{name}.weight"], self.head.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        return functional.rms_norm(x, x.shape[-1:], self.head[f"{name}.weight"], eps)

    def attend_and_mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """A layer behind its first norm: x goes to attention, whose output is added."""
        layer, size = self.layer, self.config.hidden_size // self.config.num_attention_heads

        def heads_of(name: str) -> torch.Tensor:
            out = self.linear(x, f"{layer}.self_attn.{name}_proj")
            return out.unflatten(-1, (-1, size)).transpose(0, 1)

        query, key = self.rotate(heads_of("q")), self.rotate(heads_of("k"))
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], heads_of("v")[None], is_causal=True, enable_gqa=True
        )[0]
        joined = attended.transpose(0, 1).flatten(1)
        residual = residual + self.linear(joined, f"{layer}.self_attn.o_proj")
        x = self.norm(residual, f"{layer}.post_attention_layernorm")
        gate, up = (self.linear(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return residual + self.linear(functional.silu(gate) * up, f"{layer}.mlp.down_proj")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.outer(
            torch.arange(x.shape[1]).float(), theta ** -(torch.arange(half).float() / half)
        )
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Plain(PlainHead):
    """EAGLE-3."""

    layer = "midlayer"

    def combine(self, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([states[index][0] for index in AUX], -1) @ self.head["fc.weight"].T

    def compute(
        self, rows: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(before, "midlayer.hidden_norm")
        x = torch.cat([self.norm(rows, "midlayer.input_layernorm"), normed], -1)
        residual = self.attend_and_mlp(x, before)
        return self.norm(residual, "norm"), residual

    def choose(self, state: torch.Tensor) -> int:
        best = self.best(state)
        return best + int(self.head["d2t"][best]) if "d2t" in self.head else best


class PlainEagle(PlainHead):
    layer = "layers.0"

    def combine(self, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return states[-1][0]

    def compute(
        self, rows: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(torch.cat([rows, before], -1), "fc")
        states = self.attend_and_mlp(x, x)
        if "norm.weight" in self.head:
            states = self.norm(states, "norm")
        return states, states

    def choose(self, state: torch.Tensor) -> int:
        return self.best(state)


class Watched(Recording, Eagle3Drafter):
    def __init__(self, head: Path | str, num_drafts: int = 3) -> None:
        super().__init__(str(head), num_drafts)
