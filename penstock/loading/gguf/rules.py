"""Where a GGUF file's tensors go: their Hugging Face names, and what a converter did to them.

A change is declared as data (`Rule.transform`); `checkpoint` undoes it when it reads the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class UnpermuteRope:
    """Rows of each head come as ggml's rope pairs them (2i, 2i+1); wanted: (i, i + dim / 2)."""

    heads: Literal["num_attention_heads", "num_key_value_heads"]  # the config key


@dataclass(frozen=True)
class SplitExperts:
    """One tensor has the matrices of all experts; `{e}` in the name is the expert.

    Each expert's rows are those of `parts` matrices, one above the other: `{p}` in the name.
    """

    parts: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class AsRow:
    """A matrix of one row comes as a vector."""


@dataclass(frozen=True)
class MinusOne:
    """A norm's weight comes with 1 added, as it is multiplied with."""


@dataclass(frozen=True)
class LogOfNegative:
    """A_log comes as -exp(A_log), with one column."""


@dataclass(frozen=True)
class Flat:
    """A vector comes in rows."""


@dataclass(frozen=True)
class ConvFilter:
    """[channels, 1, width] comes as [channels, width]."""


@dataclass(frozen=True)
class HalfOfKVB:
    """kv_b_proj comes as two tensors: each head's keys, transposed, and each head's values.

    Together they are one matrix, which has the keys and then the values of each head.
    """

    half: Literal["keys", "values"]


Transform = (
    UnpermuteRope | SplitExperts | AsRow | MinusOne | LogOfNegative | Flat | ConvFilter | HalfOfKVB
)


@dataclass(frozen=True)
class Rule:
    """Where a GGUF tensor goes; `{n}` in names is the layer.

    A rule without `is_whole` is for a tensor's stem: ``.weight`` and ``.bias`` follow it.
    """

    name: str
    transform: Transform | None = None
    is_whole: bool = False


def whole(name: str, transform: Transform | None = None) -> Rule:
    """A rule for a tensor whose ending is part of its name."""
    return Rule(name, transform, is_whole=True)


LAYER = "model.layers.{n}."
EMBEDDINGS = {
    "token_embd": Rule("model.embed_tokens"),
    "output_norm": Rule("model.norm"),
    "output": Rule("lm_head"),
}
ATTENTION = {
    "blk.{n}.attn_q": Rule(LAYER + "self_attn.q_proj"),
    "blk.{n}.attn_k": Rule(LAYER + "self_attn.k_proj"),
    "blk.{n}.attn_v": Rule(LAYER + "self_attn.v_proj"),
    "blk.{n}.attn_output": Rule(LAYER + "self_attn.o_proj"),
}
PERMUTED = {
    "blk.{n}.attn_q": Rule(LAYER + "self_attn.q_proj", UnpermuteRope("num_attention_heads")),
    "blk.{n}.attn_k": Rule(LAYER + "self_attn.k_proj", UnpermuteRope("num_key_value_heads")),
}
HEAD_NORMS = {
    "blk.{n}.attn_q_norm": Rule(LAYER + "self_attn.q_norm"),
    "blk.{n}.attn_k_norm": Rule(LAYER + "self_attn.k_norm"),
}
NORMS = {
    "blk.{n}.attn_norm": Rule(LAYER + "input_layernorm"),
    "blk.{n}.ffn_norm": Rule(LAYER + "post_attention_layernorm"),
}
# Where the norm between attention and MLP has another name.
NORMS_POST = {
    "blk.{n}.attn_norm": Rule(LAYER + "input_layernorm"),
    "blk.{n}.post_attention_norm": Rule(LAYER + "post_attention_layernorm"),
}
GATED_MLP = {
    "blk.{n}.ffn_gate": Rule(LAYER + "mlp.gate_proj"),
    "blk.{n}.ffn_up": Rule(LAYER + "mlp.up_proj"),
    "blk.{n}.ffn_down": Rule(LAYER + "mlp.down_proj"),
}
FUSED_MLP = {
    "blk.{n}.ffn_up": Rule(LAYER + "mlp.gate_up_proj"),
    "blk.{n}.ffn_down": Rule(LAYER + "mlp.down_proj"),
}
EXPERTS = {
    "blk.{n}.ffn_gate_inp": Rule(LAYER + "mlp.gate"),
    "blk.{n}.ffn_gate_exps": Rule(LAYER + "mlp.experts.{e}.gate_proj", SplitExperts()),
    "blk.{n}.ffn_up_exps": Rule(LAYER + "mlp.experts.{e}.up_proj", SplitExperts()),
    "blk.{n}.ffn_down_exps": Rule(LAYER + "mlp.experts.{e}.down_proj", SplitExperts()),
    # What some converters write in place of the first two.
    "blk.{n}.ffn_gate_up_exps": Rule(
        LAYER + "mlp.experts.{e}.{p}_proj", SplitExperts(parts=("gate", "up"))
    ),
}
SHARED_EXPERT = {
    "blk.{n}.ffn_gate_shexp": Rule(LAYER + "mlp.shared_expert.gate_proj"),
    "blk.{n}.ffn_up_shexp": Rule(LAYER + "mlp.shared_expert.up_proj"),
    "blk.{n}.ffn_down_shexp": Rule(LAYER + "mlp.shared_expert.down_proj"),
}
SHARED_GATE = {
    "blk.{n}.ffn_gate_inp_shexp": Rule(LAYER + "mlp.shared_expert_gate", AsRow()),
}
# Converters of 2024 left the ending out.
CORRECTION = {
    "blk.{n}.exp_probs_b.bias": whole(LAYER + "mlp.gate.e_score_correction_bias"),
    "blk.{n}.exp_probs_b": whole(LAYER + "mlp.gate.e_score_correction_bias"),
}
DECODER = {**EMBEDDINGS, **ATTENTION, **NORMS, **GATED_MLP}


def minus_one(rules: dict[str, Rule]) -> dict[str, Rule]:
    """The same rules for norms to whose weights a converter added 1."""
    return {stem: Rule(rule.name, MinusOne()) for stem, rule in rules.items()}


def mamba(mixer: str) -> dict[str, Rule]:
    """The tensors of a Mamba-2 that a model has as `mixer`."""
    return {
        "blk.{n}.ssm_in": Rule(mixer + "in_proj"),
        "blk.{n}.ssm_conv1d.weight": whole(mixer + "conv1d.weight", ConvFilter()),
        "blk.{n}.ssm_conv1d.bias": whole(mixer + "conv1d.bias"),
        "blk.{n}.ssm_dt.bias": whole(mixer + "dt_bias"),
        "blk.{n}.ssm_a": whole(mixer + "A_log", LogOfNegative()),
        "blk.{n}.ssm_d": whole(mixer + "D", Flat()),
        "blk.{n}.ssm_norm.weight": whole(mixer + "norm.weight", Flat()),
        "blk.{n}.ssm_out": Rule(mixer + "out_proj"),
    }
