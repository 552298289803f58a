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
    folder: Path, target: Path, speculators: bool = False, num_tokens: int = 96, **changes: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random head that drafts `num_tokens` of the target's tokens.

    Its tensors are returned under the names of the EAGLE authors.
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
    chosen = torch.randperm(settings["vocab_size"], generator=generator)[:num_tokens].sort().values
    tensors = {
        "fc.weight": rand(size, len(AUX) * size),
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
        "lm_head.weight": 4 * rand(num_tokens, size),
        "d2t": chosen - torch.arange(num_tokens),
        "t2d": torch.zeros(settings["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True),
    }
    layer = {**settings, "num_hidden_layers": 1, "max_position_embeddings": 16}
    own = {"draft_vocab_size": num_tokens, "eagle_aux_hidden_state_layer_ids": AUX, **changes}
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


# -- the same computation, plainly


class Plain:
    """The head over a whole text at once, in torch. The target is transformers'."""

    def __init__(self, target: Path, head: Tensors) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config, self.head = self.target.config, head

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What the head proposes behind these tokens, greedily."""
        ids = torch.tensor([token_ids])
        states = self.target(ids, output_hidden_states=True).hidden_states
        combined = torch.cat([states[index][0] for index in AUX], -1) @ self.head["fc.weight"].T
        before = torch.cat([torch.zeros_like(combined[:1]), combined[:-1]])
        embed = self.target.get_input_embeddings()
        rows = embed(ids)[0]
        drafts: list[int] = []
        for _ in range(count):
            states, last = self._layer(rows, before)
            best = int((states @ self.head["lm_head.weight"].T).argmax())
            drafts.append(best + int(self.head["d2t"][best]))
            rows = torch.cat([rows, embed(torch.tensor(drafts[-1:]))])
            before = torch.cat([before, last[None]])
        return drafts

    def _layer(self, rows: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last row's normed state, and the hidden state behind it."""
        head, heads = self.head, self.config.num_attention_heads
        size = self.config.hidden_size // heads
        normed = self._norm(before, "midlayer.hidden_norm")
        x = torch.cat([self._norm(rows, "midlayer.input_layernorm"), normed], -1)

        def heads_of(name: str) -> torch.Tensor:
            out = x @ head[f"midlayer.self_attn.{name}_proj.weight"].T
            return out.unflatten(-1, (-1, size)).transpose(0, 1)

        query, key = self._rotate(heads_of("q")), self._rotate(heads_of("k"))
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], heads_of("v")[None], is_causal=True, enable_gqa=True
        )[0]
        out = attended.transpose(0, 1).flatten(1) @ head["midlayer.self_attn.o_proj.weight"].T
        residual = before + out
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up, down = (head[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        residual = residual + (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return self._norm(residual[-1:], "norm")[0], residual[-1]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        return functional.rms_norm(x, x.shape[-1:], self.head[f"{name}.weight"], eps)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.outer(
            torch.arange(x.shape[1]).float(), theta ** -(torch.arange(half).float() / half)
        )
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Watched(Recording, Eagle3Drafter):
    def __init__(self, head: Path | str, num_drafts: int = 3) -> None:
        super().__init__(str(head), num_drafts)
