"""The pre-norm decoder of most text models. An architecture's file defines what differs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from penstock.distributed.stage_link import States
from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import Experts
from penstock.layers.norm import Norm, RMSNorm
from penstock.layers.rotary import Rotary, rotary_parameters
from penstock.layers.sublayers import Angles, GatedMLP, RotaryAttention, Stream
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.config import DecoderConfig
from penstock.ops.sharded_sampling import VocabShard
from penstock.protocol.errors import ModelError

logger = logging.getLogger(__name__)


class FusedLayer(Protocol):
    """A whole decoder layer in one call, on devices that support it."""

    def applies(self) -> bool:
        """Whether it computes all that hooks into the layer's parts in this step."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        """Like the layer's forward. x and residual may be changed in place."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The norms do the additions."""

    def __init__(
        self,
        attention: nn.Module,  # called like RotaryAttention
        mlp: nn.Module,
        input_norm: Norm,
        post_attention_norm: Norm,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_norm
        self.self_attn = attention
        self.post_attention_layernorm = post_attention_norm
        self.mlp = mlp
        self.fused: FusedLayer | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        if self.fused is not None and self.fused.applies():
            return self.fused(x, residual, angles)
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def write(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> None:
        """Cache what later rows read of these, whose output nobody needs."""
        attention: Any = self.self_attn
        attention.write(self.input_layernorm.add(x, residual)[0], angles)


class SandwichLayer(nn.Module):
    """x + norm(attention(norm(x))), then the same with the MLP.

    The next layer does its addition.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: list[Norm]) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles) -> Stream:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, angles))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Decoder(nn.Module):
    """Embedding, layers and the final norm: ``model`` in checkpoints.

    A pipeline stage has some of them. In place of the other layers there are empty modules.
    """

    def __init__(
        self,
        embedding: VocabEmbedding | None,
        layers: list[nn.Module],
        norm: Norm | None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class DecoderLM(Model):
    """A decoder with a language-model head.

    Architectures override `attention`, `mlp`, `norm` or the whole `layer` where theirs differ.
    """

    weights = WeightTable(ignored=(r"\.rotary_emb\.inv_freq$",))
    gives_aux = True
    has_stages = True
    defaults: ClassVar[Mapping[str, Any]] = {}  # of keys missing in config.json
    nullable: ClassVar[tuple[str, ...]] = ()  # settings whose null does not mean the default
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")  # supported by `mlp`
    interleaved_rotary: ClassVar[bool] = False
    rotary_class: ClassVar[type[Rotary]] = Rotary
    embedding_multiplier: float = 1.0
    attention_class: ClassVar[type[RotaryAttention]] = RotaryAttention

    @classmethod
    def settings(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json's settings under the names of `DecoderConfig`."""
        return {**cls.defaults, **raw}

    @classmethod
    def create(cls, build: Build, raw: Mapping[str, Any]) -> DecoderLM:
        kept = cls.nullable
        given = {key: value for key, value in raw.items() if value is not None or key in kept}
        return cls(build, DecoderConfig.from_raw(cls.settings(given)))

    def __init__(self, build: Build, config: DecoderConfig) -> None:
        super().__init__()
        config.check_shards(build.tp.size)
        activation = config.raw.get("hidden_act", self.activations[0])
        if activation not in self.activations:
            raise ModelError(
                f"config.json: hidden_act {activation!r} is not supported, "
                f"only {' and '.join(self.activations)}"
            )
        self.build = build
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.rotary = self.rotary_class(
            build,
            config.head_dim,
            config.max_position,
            rotary_parameters(config.raw),
            self.interleaved_rotary,
        )
        mesh = build.mesh
        self.stage = mesh.layers_of_stage(config.num_layers)  # the layers of this rank
        layers = [
            self.layer(index) if index in self.stage else nn.Identity()
            for index in range(config.num_layers)
        ]
        embeds_last = config.tie_word_embeddings or build.embeds_drafts
        embeds = mesh.is_first_stage or (mesh.is_last_stage and embeds_last)
        self.model = Decoder(
            VocabEmbedding(build, config.vocab_size, config.hidden_size) if embeds else None,
            layers,
            self.norm() if mesh.is_last_stage else None,
        )
        self.lm_head: VocabEmbedding | None = None
        if mesh.pp.size > 1:
            self.weights = replace(self.weights, elsewhere=self._elsewhere())
        if not build.generates:
            self.weights = _without_head(self.weights)
        elif config.tie_word_embeddings:
            ignored = (*self.weights.ignored, r"^lm_head\.weight$")
            self.weights = replace(self.weights, ignored=ignored)
        elif mesh.is_last_stage:
            self.lm_head = VocabEmbedding(build, config.vocab_size, config.hidden_size)
        sparse = [module for module in self.modules() if isinstance(module, Experts)]
        for choice in dict.fromkeys(module.choice for module in sparse):
            logger.debug("Experts are computed by %s", choice)

    def _elsewhere(self) -> tuple[str, ...]:
        """Patterns of the parameters that only other pipeline stages have."""
        others = [str(i) for i in range(self.config.num_layers) if i not in self.stage]
        patterns = [rf"^model\.layers\.(?:{'|'.join(others)})\."]
        if self.model.embed_tokens is None:
            patterns.append(r"^model\.embed_tokens\.")
        if self.model.norm is None:
            patterns.append(r"^(?!model\.(?:layers|embed_tokens)\.)")
        return tuple(patterns)

    def norm(self) -> Norm:
        """A norm of hidden states."""
        return RMSNorm(self.build, self.config.hidden_size, self.config.rms_norm_eps)

    def layer(self, index: int) -> nn.Module:
        """Layer `index`, called like a DecoderLayer. The caller adds its two results."""
        return DecoderLayer(self.attention(index), self.mlp(index), self.norm(), self.norm())

    def mtp_layer(self, depth: int) -> nn.Module:
        """The layer inside a multi-token-prediction (MTP) layer, if there is one."""
        return self.layer(self.config.num_layers + depth)

    def sandwich_layer(self, index: int) -> SandwichLayer:
        """Layer `index`, with norms before and after attention and MLP."""
        norms = [self.norm() for _ in range(4)]
        return SandwichLayer(self.attention(index), self.mlp(index), norms)

    @property
    def attention_bias(self) -> bool:
        """Whether config.json gives the attention projections biases, by the common key."""
        return bool(self.config.raw.get("attention_bias", False))

    def attention(self, index: int) -> nn.Module:
        """The attention module of layer `index`, called like RotaryAttention."""
        return self.rotary_attention(index, self.attention_bias)

    def mlp(self, index: int) -> nn.Module:
        """The module after attention in layer `index`."""
        return GatedMLP(self.build, self.config.hidden_size, self.config.intermediate_size)

    def rotary_attention(
        self,
        index: int,
        bias: bool = False,
        output_bias: bool | None = None,  # None: as of queries, keys and values
        window: int | None = None,
        has_positions: bool = True,
        rotary: Rotary | None = None,  # instead of the model's
        **options: Any,  # of RotaryAttention
    ) -> RotaryAttention:
        """The common attention module, an `attention_class`, with the sizes of config.json."""
        if window is not None and not self.is_causal:
            window -= 1  # per side: a causal window counts the token itself
        config = self.config
        return self.attention_class(
            self.build,
            f"model.layers.{index}",
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            (rotary or self.rotary) if has_positions else None,
            qkv_bias=bias,
            output_bias=bias if output_bias is None else output_bias,
            window=window,
            kind="causal" if self.is_causal else "bidirectional",
            **options,
        )

    @property
    def is_causal(self) -> bool:
        """Whether tokens see only earlier tokens. Embedding models may differ."""
        raw = self.config.raw
        sees_all = raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True
        return self.build.generates or not sees_all

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.model.embed_tokens is not None, "this stage does not embed"
        x: torch.Tensor = self.model.embed_tokens(token_ids)
        return x if self.embedding_multiplier == 1.0 else x * self.embedding_multiplier

    def angles(self, positions: torch.Tensor) -> Sequence[Any]:
        """The angles of positions [n] for the attention of each layer, computed once per step."""
        return [self.rotary.angles(positions)] * self.config.num_layers

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        return self._run(x, None, {}, positions)

    def resume(self, handed: States, positions: torch.Tensor) -> Hidden:
        x, residual, *aux = handed
        return self._run(x, residual, dict(zip(self._earlier_aux, aux, strict=True)), positions)

    @property
    def num_handed(self) -> int:
        return 2 + len(self._earlier_aux) if self.stage.start else 0

    @property
    def _earlier_aux(self) -> list[int]:
        """The layers of earlier stages whose inputs are handed on, in order."""
        return sorted({index for index in self.aux_layers if index < self.stage.start})

    def _run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        aux: dict[int, torch.Tensor],  # by layer, so far
        positions: torch.Tensor,
    ) -> Hidden:
        angles, layers = self.angles(positions), [*self.model.layers]
        for index in self.stage:
            if index in self.aux_layers:  # before the layer changes them in place
                aux[index] = x.clone() if residual is None else x + residual
            x, residual = layers[index](x, residual, angles[index])
        if self.model.norm is None:
            return Hidden(x, tuple(aux.values()), residual=residual)
        states, residual = self.model.norm.add(x, residual)
        return Hidden(states, tuple(aux[index] for index in self.aux_layers))

    @property
    def head(self) -> VocabEmbedding:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last stage has the head"
        return head

    @property
    def vocab_shard(self) -> VocabShard | None:
        return self.head.shard

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.head.project(hidden.states[rows], out)


def _without_head(weights: WeightTable) -> WeightTable:
    """For a checkpoint whose head is not needed, or that was saved without one.

    The latter also lacks the prefix of the backbone.
    """
    return replace(
        weights,
        ignored=(*weights.ignored, r"^(language_model\.)?lm_head\."),
        renamed={**weights.renamed, r"^(?!model\.|lm_head\.|score\.)": "model."},
    )
