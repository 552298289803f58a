"""The encoder of BERT and its descendants. An architecture's file defines what differs.

Layers have the names of transformers' newer encoders. Older checkpoints are renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from penstock.layers.build import Build
from penstock.layers.context import current_context
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import Linear, Part, column_linear, row_linear
from penstock.layers.norm import LayerNorm
from penstock.layers.quantization import DenseMethod
from penstock.layers.rotary import Rotary, rotary_parameters
from penstock.layers.sublayers import Angles, RotaryAttention
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.config import TransformerConfig, read_float, read_int, read_num_labels
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.pooling import PoolingType

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu", "quick_gelu"]

# By their name in config.json.
ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
FUNCTIONS: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def read_activation(raw: Mapping[str, Any], name: str) -> ActivationName:
    given = raw.get(name)
    found = ACTIVATIONS.get("gelu" if given is None else given)
    if found is None:
        raise ModelError(
            f"config.json: {name} {given!r:.80} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    return found


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    norm_eps: float
    num_types: int  # number of token types; 0: the model has none
    activation: ActivationName

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> EncoderConfig:
        hidden_size, num_heads = read_int(raw, "hidden_size"), read_int(raw, "num_attention_heads")
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size ({hidden_size}) must be a multiple of "
                f"num_attention_heads ({num_heads})"
            )
        return cls(
            norm_eps=read_float(raw, "layer_norm_eps", 1e-12),
            num_types=read_int(raw, "type_vocab_size", 0, low=0),
            activation=read_activation(raw, "hidden_act"),
            **cls.read_common(raw, max_position=512),
        )

    def check_build(self, build: Build, kind: str) -> None:
        """Refuse to generate, and a number of ranks that does not divide the model."""
        if build.generates:
            raise ConfigError(
                f"the model is {kind}, which has no next token to generate: use --runner pooling, "
                "or leave --runner out"
            )
        self.check_shards(build.tp.size)


class EncoderMLP(nn.Module):
    """down(activation(up(x))); with a gate, down(activation(gate(x)) * up(x))."""

    def __init__(
        self, build: Build, config: EncoderConfig, is_gated: bool, up_bias: bool, down_bias: bool
    ) -> None:
        super().__init__()
        size = config.intermediate_size
        outputs = {"gate_proj": size, "up_proj": size} if is_gated else {"up_proj": size}
        self.is_gated = is_gated
        self.activation = config.activation
        self.gate_up_proj = column_linear(build, config.hidden_size, outputs, up_bias)
        self.down_proj = row_linear(build, size, config.hidden_size, down_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activate = FUNCTIONS[self.activation]
        middle = self.gate_up_proj(x)
        if self.is_gated:
            gate, up = middle.chunk(2, dim=-1)
            middle = activate(gate) * up
        else:
            middle = activate(middle)
        return self.down_proj(middle)


class FusedEncoderLayer(Protocol):
    """A whole encoder layer in one call, on devices that support it."""

    def applies(self) -> bool:
        """Whether no adapter hooks into the layer's parts now."""

    def __call__(
        self, x: torch.Tensor, starts: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        """Like the layer's forward, with texts at `starts`. x may be changed in place."""


@dataclass(frozen=True)
class EncoderParts:
    """What an encoder layer consists of, whatever its class."""

    norms: tuple[LayerNorm | None, LayerNorm]  # of attention and of the MLP
    linears: tuple[Linear, Linear, Linear, Linear]  # qkv, output, up (with the gate), down
    num_heads: int
    head_dim: int
    scale: float
    activation: str
    is_gated: bool = False
    norm_first: bool = True
    window: int | None = None


class FusableLayer(nn.Module):
    """An encoder layer that a device may compute in one call."""

    fused: FusedEncoderLayer | None = None

    def parts(self) -> EncoderParts | None:
        """None: it does more than its parts."""
        raise NotImplementedError


class EncoderLayer(FusableLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)).

    With `norm_first`, the norms apply to the inputs of attention and MLP. Then the first layer may
    have no attention norm.
    """

    def __init__(
        self,
        attention: RotaryAttention,
        mlp: EncoderMLP,
        attention_norm: LayerNorm | None,
        mlp_norm: LayerNorm,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        assert norm_first or attention_norm is not None, "a norm behind attention"
        self.self_attn = attention
        self.post_attention_layernorm = attention_norm
        self.mlp = mlp
        self.post_mlp_layernorm = mlp_norm
        self.norm_first = norm_first

    def parts(self) -> EncoderParts | None:
        attention, mlp = self.self_attn, self.mlp
        if type(self) is not EncoderLayer or type(attention) is not RotaryAttention:
            return None
        is_plain = (
            attention.q_norm is None
            and attention.attention.kind == "bidirectional"
            and (attention.rotary is None or not attention.rotary.interleaved)
            and attention.num_heads == attention.num_kv_heads
        )
        if not is_plain:
            return None
        return EncoderParts(
            (self.post_attention_layernorm, self.post_mlp_layernorm),
            (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj),
            attention.num_heads, attention.head_dim, attention.attention.scale, mlp.activation,
            mlp.is_gated, self.norm_first, attention.attention.window,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        if self.fused is not None and self.fused.applies():
            return self.fused(x, current_context().query_starts, angles)
        attention_norm, mlp_norm = self.post_attention_layernorm, self.post_mlp_layernorm
        if self.norm_first:
            normed = x if attention_norm is None else attention_norm(x)
            x = x + self.self_attn(normed, angles)
            return x + self.mlp(mlp_norm(x))
        assert attention_norm is not None
        x = attention_norm(x, self.self_attn(x, angles))
        return mlp_norm(x, self.mlp(x))


class EncoderEmbeddings(nn.Module):
    """The sum of token, type and, without rotary embedding, position embeddings."""

    def __init__(
        self, build: Build, config: EncoderConfig, norm: LayerNorm, positions: int
    ) -> None:
        super().__init__()
        # Rows are only looked up, never multiplied: the plain layout is fastest.
        plain = replace(build, linear_method=DenseMethod())
        size = config.hidden_size
        self.word_embeddings = VocabEmbedding(plain, config.vocab_size, size)
        self.token_type_embeddings = (
            VocabEmbedding(plain, config.num_types, size) if config.num_types else None
        )
        self.position_embeddings = VocabEmbedding(plain, positions, size) if positions else None
        self.LayerNorm = norm
        self.num_types = config.num_types

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, first_position: int
    ) -> torch.Tensor:
        """Add to word embeddings. `first_position` is the row of a request's first token."""
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions + first_position)
        if self.token_type_embeddings is not None:
            x = x + self.token_type_embeddings(self._types(positions))
        return self.LayerNorm(x)

    def _types(self, positions: torch.Tensor) -> torch.Tensor:
        context = current_context()
        if context.second_segments is None or self.num_types < 2:
            return torch.zeros_like(positions)
        return (positions >= context.second_segments[context.token_slots]).long()


class EncoderHead(nn.Module):
    """Logits of labels: a matrix, in most models after a dense layer with an activation."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_labels: int,
        pooling: PoolingType,
        activate: Callable[[torch.Tensor], torch.Tensor] | None,  # None: no dense layer
        dense_bias: bool = True,
        norm: LayerNorm | None = None,
    ) -> None:
        super().__init__()
        build = build.in_float32()
        self.num_labels, self.pooling = num_labels, pooling
        self.activate = activate
        self.dense: Linear | None = None
        if activate is not None:
            self.dense = Linear(build, hidden_size, [Part("", hidden_size, 1)], dense_bias)
            self.dense.is_label_head = True
        self.norm = norm
        self.out_proj = Linear(build, hidden_size, [Part("", num_labels, 1)], bias=True)
        self.out_proj.is_label_head = True

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        if self.dense is not None and self.activate is not None:
            pooled = self.activate(self.dense(pooled))
        if self.norm is not None:
            pooled = self.norm(pooled)
        return self.out_proj(pooled)


# Tensors that pooling does not need, by name.
IGNORED = (
    r"(^|\.)(position_ids|token_type_ids|inv_freq)$",
    r"^(cls|lm_head|vocab_\w+|mlm_head|head|decoder)\.",
    r"^(\w+\.)?pooler\.",
)


class EncoderModel(Model):
    """Embeddings and layers. Architectures override `settings`, `layer`, `head` and others."""

    is_rotary: ClassVar[bool] = False  # else positions are embedded
    is_gated: ClassVar[bool] = False
    attention_bias: ClassVar[bool] = True
    up_bias: ClassVar[bool] = True
    down_bias: ClassVar[bool] = True
    pooling: ClassVar[PoolingType] = "MEAN"
    prefix: ClassVar[str] = ""  # of checkpoints with a head, such as "bert."
    renamed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json's settings under the names of `EncoderConfig`."""
        return dict(raw)

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> EncoderModel:
        given = {key: value for key, value in raw.items() if value is not None}
        return cls(build, EncoderConfig.from_raw(cls.settings(given)))

    def __init__(self, build: Build, config: EncoderConfig) -> None:
        super().__init__()
        config.check_build(build, "an encoder")
        self.build = build
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self._rotaries: dict[str, Rotary] = {}
        positions = 0 if self.is_rotary else config.max_position
        self.embeddings = EncoderEmbeddings(build, config, self.norm(), positions)
        self.layers = nn.ModuleList(self.layer(index) for index in range(config.num_layers))
        self.final_norm = self.last_norm()
        names = [str(name) for name in config.raw.get("architectures") or ()]
        by_token = any(name.endswith("ForTokenClassification") for name in names)
        if by_token or any(name.endswith("ForSequenceClassification") for name in names):
            self.classifier = self.head(read_num_labels(config.raw), by_token)
        renamed = {rf"^{self.prefix}": "", **self.renamed, **self.head_names()}
        self.weights = WeightTable(IGNORED, renamed)

    def head_names(self) -> Mapping[str, str]:
        """Maps the checkpoint's head to `classifier.dense` and `classifier.out_proj`."""
        if self.classifier is None:
            return {}
        return {
            r"^classifier\.(weight|bias)$": r"classifier.out_proj.\1",
            r"^pooler\.dense\.": "classifier.dense.",
        }

    def first_position(self) -> int:
        """The row of a request's first token in the position embedding."""
        return 0

    def norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.build, self.config.hidden_size, self.config.norm_eps, bias=True)

    def last_norm(self) -> LayerNorm | None:
        return None

    def layer(self, index: int) -> EncoderLayer:
        rotary = self.rotary(self.config.raw) if self.is_rotary else None
        mlp = EncoderMLP(self.build, self.config, self.is_gated, self.up_bias, self.down_bias)
        attention = self.attention(index, self.attention_bias, rotary)
        return EncoderLayer(attention, mlp, self.norm(), self.norm())

    def attention(
        self, index: int, bias: bool, rotary: Rotary | None, reach: int | None = None
    ) -> RotaryAttention:
        """Attention of layer `index`, to tokens at most `reach` positions away."""
        config = self.config
        return RotaryAttention(
            self.build, f"layers.{index}", config.hidden_size, config.num_heads, config.num_heads,
            config.head_dim, rotary, qkv_bias=bias, output_bias=bias, window=reach,
            kind="bidirectional",
        )  # fmt: skip

    def rotary(self, raw: Mapping[str, Any], kind: str = "") -> Rotary:
        """The rotary embedding of one kind of layer, from rope settings in a config.json."""
        if kind not in self._rotaries:
            config = self.config
            self._rotaries[kind] = Rotary(
                self.build, config.head_dim, config.max_position, rotary_parameters(raw)
            )
        return self._rotaries[kind]

    def head(self, num_labels: int, by_token: bool) -> EncoderHead:
        """The classifier of a token's state: of every token if `by_token`, else of the first."""
        return EncoderHead(
            self.build, self.config.hidden_size, num_labels, "ALL" if by_token else "CLS",
            None if by_token else torch.tanh,
        )  # fmt: skip

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embeddings.word_embeddings(token_ids)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        x = self.embeddings(x, positions, self.first_position())
        angles: dict[Rotary, Angles] = {}
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            rotary = layer.self_attn.rotary
            if rotary is not None and rotary not in angles:
                angles[rotary] = rotary.angles(positions)
            x = layer(x, None if rotary is None else angles[rotary])
        return Hidden(x if self.final_norm is None else self.final_norm(x))
