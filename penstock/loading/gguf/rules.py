"""Maps GGUF tensors to Hugging Face names, and declares what a converter did to them.

A change is data (`Rule.transform`). `checkpoint` reverses it when it reads the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal


@dataclass(frozen=True)
class UnpermuteRope:
    """Rows of each head are in ggml's rope pairs (2i, 2i+1); we need halves (i, i + dim / 2)."""

    heads: Literal["num_attention_heads", "num_key_value_heads"]  # config key


@dataclass(frozen=True)
class SplitExperts:
    """One tensor contains the matrices of all experts; `{e}` in the name is the expert.

    Each expert has the rows of `parts` matrices, concatenated: `{p}` in the name.
    """

    parts: tuple[str, ...] = ("",)


class Stored(Enum):
    """How a tensor is stored, where that takes no setting."""

    AS_VECTOR = auto()  # a matrix with one row
    PLUS_ONE = auto()  # a norm's weight, with 1 added
    MINUS_EXP = auto()  # A_log, as -exp(A_log) with one column
    IN_ROWS = auto()  # a vector
    SQUEEZED = auto()  # a filter [channels, 1, width], as [channels, width]


@dataclass(frozen=True)
class HalfOfKVB:
    """kv_b_proj is stored as two tensors: each head's keys, transposed, and its values.

    The joined matrix has the keys, then the values of each head.
    """

    half: Literal["keys", "values"]


@dataclass(frozen=True)
class Piece:
    """One of several tensors that we have as one: rows after rows, or frames of a filter.

    A filter [out, channels, frames, height, width] is stored as one tensor for each frame.
    """

    number: int  # from 0 on
    count: int
    kind: Literal["rows", "frames"] = "rows"


@dataclass(frozen=True)
class LeadingOnes:
    """A tensor with `num_dims` dimensions, of which converters drop leading ones of size 1."""

    num_dims: int


Transform = UnpermuteRope | SplitExperts | HalfOfKVB | Piece | LeadingOnes | Stored


@dataclass(frozen=True)
class Rule:
    """The Hugging Face name of a GGUF tensor; `{n}` in names is the layer.

    Unless `is_whole`, a rule is for a tensor's stem, and ``.weight`` and ``.bias`` are appended.
    """

    name: str
    transform: Transform | None = None
    is_whole: bool = False


def whole(name: str, transform: Transform | None = None) -> Rule:
    """A rule for a tensor whose suffix is part of its name."""
    return Rule(name, transform, is_whole=True)


LAYER = "model.layers.{n}."


def in_layer(names: Mapping[str, str], path: str = "") -> dict[str, Rule]:
    """Rules of a layer, from GGUF names to Hugging Face names within `path`."""
    return {f"blk.{{n}}.{stem}": Rule(f"{LAYER}{path}{name}") for stem, name in names.items()}


EMBEDDINGS = {
    "token_embd": Rule("model.embed_tokens"),
    "output_norm": Rule("model.norm"),
    "output": Rule("lm_head"),
}
ATTENTION = in_layer(
    {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"},
    "self_attn.",
)
PERMUTED = {
    "blk.{n}.attn_q": Rule(LAYER + "self_attn.q_proj", UnpermuteRope("num_attention_heads")),
    "blk.{n}.attn_k": Rule(LAYER + "self_attn.k_proj", UnpermuteRope("num_key_value_heads")),
}
HEAD_NORMS = in_layer({"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}, "self_attn.")
NORMS = in_layer({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
# For files with another name of the norm between attention and MLP.
NORMS_POST = in_layer(
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
)
# Norms after attention and MLP, not before.
NORMS_BEHIND = in_layer(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GATED = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
GATED_MLP = in_layer(GATED, "mlp.")
FUSED_MLP = in_layer({"ffn_up": "gate_up_proj", "ffn_down": "down_proj"}, "mlp.")
EXPERTS = {
    "blk.{n}.ffn_gate_inp": Rule(LAYER + "mlp.gate"),
    **{
        f"blk.{{n}}.{stem}_exps": Rule(f"{LAYER}mlp.experts.{{e}}.{name}", SplitExperts())
        for stem, name in GATED.items()
    },
    # Some converters write this in place of the first two.
    "blk.{n}.ffn_gate_up_exps": Rule(
        LAYER + "mlp.experts.{e}.{p}_proj", SplitExperts(parts=("gate", "up"))
    ),
}
SHARED_EXPERT = in_layer(
    {f"{stem}_shexp": name for stem, name in GATED.items()}, "mlp.shared_expert."
)
SHARED_GATE = {
    "blk.{n}.ffn_gate_inp_shexp": Rule(LAYER + "mlp.shared_expert_gate", Stored.AS_VECTOR),
}
# Converters of 2024 omitted the suffix.
CORRECTION = {
    f"blk.{{n}}.exp_probs_b{ending}": whole(LAYER + "mlp.gate.e_score_correction_bias")
    for ending in (".bias", "")
}
HEADS = {**EMBEDDINGS, **ATTENTION}
DECODER = {**HEADS, **NORMS, **GATED_MLP}
SPARSE_DECODER = {**HEADS, **NORMS, **EXPERTS}


def minus_one(rules: dict[str, Rule]) -> dict[str, Rule]:
    """The same rules for norms whose weights are stored with 1 added."""
    return {stem: Rule(rule.name, Stored.PLUS_ONE) for stem, rule in rules.items()}


def mamba(mixer: str) -> dict[str, Rule]:
    """The tensors of a Mamba-2 layer that the model calls `mixer`."""
    return {
        "blk.{n}.ssm_in": Rule(mixer + "in_proj"),
        "blk.{n}.ssm_conv1d.weight": whole(mixer + "conv1d.weight", Stored.SQUEEZED),
        "blk.{n}.ssm_conv1d.bias": whole(mixer + "conv1d.bias"),
        "blk.{n}.ssm_dt.bias": whole(mixer + "dt_bias"),
        "blk.{n}.ssm_a": whole(mixer + "A_log", Stored.MINUS_EXP),
        "blk.{n}.ssm_d": whole(mixer + "D", Stored.IN_ROWS),
        "blk.{n}.ssm_norm.weight": whole(mixer + "norm.weight", Stored.IN_ROWS),
        "blk.{n}.ssm_out": Rule(mixer + "out_proj"),
    }
