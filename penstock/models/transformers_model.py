"""Decoders without a file here, run on transformers' modelling code.

The modules are transformers'. Attention, its cache, linear layers and the embedding are Penstock's,
so weights stream in and are stored as for any other model. See docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.models.base import Hidden, Model, WeightTable
from penstock.models.transformers_modules import (
    make_loadable,
    materialize,
    replace_matrices,
)
from penstock.models.transformers_probe import (
    PROBE,
    AttentionCall,
    Probe,
    probe_model,
    refusal,
)
from penstock.models.transformers_weights import CheckpointNames
from penstock.ops.blocks import Weight
from penstock.protocol.errors import ConfigError, ModelError

PAGED, ALONE = "penstock", "penstock_alone"
NUM_CHECKED = 8  # tokens
LARGEST_DIFFERENCE = 0.05  # allowed change of a token's hidden state between batches


class TransformersLM(Model):
    """A transformers model behind the interface of `Model`.

    It refuses, with the reason: models that cannot be probed (`transformers_probe`), rotary
    frequencies that change with the batch, several ranks, and, after loading, layers that mix
    tokens outside attention (`check`).
    """

    can_capture = False  # transformers' code may read from the device at any time

    def __init__(self, build: Build, name: str, raw: Mapping[str, Any]) -> None:
        super().__init__()
        if build.tp.size > 1:
            raise ConfigError(
                f"tensor_parallel_size must be 1 for {name}, which runs on transformers' "
                "implementation, "
                f"got {build.tp.size}"
            )
        model = _construct(build, name, raw)
        self.name = name
        self.device, self.max_model_len = build.device, build.max_model_len
        config = model.config.get_text_config()
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        _check_positions(config, name, build.max_model_len)
        probe = probe_model(model, name)
        self.names = CheckpointNames(model)
        self.weights = WeightTable(ignored=_ignored(model))
        embedding = replace_matrices(build, model, probe.linears)
        materialize(model, build.device)
        for path, call in probe.attention.items():
            call.module.paged_attention = _attention(build, path, call)
        self.whole = _Whole(model, probe, embedding)
        for child_name, child in model.named_children():
            self.add_module(child_name, child)
        make_loadable(self)

    def convert(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """A checkpoint's tensors under the modules' names."""
        return self.names.convert(tensors)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.whole.embedding(token_ids)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Hidden:
        return Hidden(self.whole.hidden(x, positions))

    def logits(
        self, hidden: Hidden, rows: torch.Tensor | slice, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self.whole.logits(hidden.states[rows])
        return logits if out is None else out.copy_(logits)

    @torch.inference_mode()
    def check(self) -> None:
        """Refuse a loaded model that mixes tokens outside attention.

        Without attention, a token's hidden state depends only on the token and its position, not on
        its place in the batch.
        """
        ids = torch.arange(1, NUM_CHECKED + 1, device=self.device) % self.vocab_size
        positions = torch.arange(NUM_CHECKED, device=self.device) * 5 % self.max_model_len
        config = self.whole.model.config
        config._attn_implementation = ALONE
        try:
            x = self.embed(ids)
            there = self.whole.hidden(x, positions).float()
            back = self.whole.hidden(x.flip(0), positions.flip(0)).flip(0).float()
        except Exception as error:  # third-party code may raise anything
            raise ModelError(
                f"{self.name} cannot run on transformers' implementation with Penstock's layers: "
                f"{type(error).__name__}: {error}"[:400]
            ) from error
        finally:
            config._attn_implementation = PAGED
        limit = LARGEST_DIFFERENCE * there.abs().amax(-1)
        # Rounding may route a token to another expert. Mixing tokens changes most of them.
        num_changed = int(((there - back).abs().amax(-1) > limit).sum())
        if num_changed > NUM_CHECKED // 2:
            raise refusal(
                self.name,
                "has tokens that reach each other on other ways than attention, or positions of "
                "its own, so that requests cannot be computed beside each other",
            )


class _Whole:
    """The transformers model. Not a module, because only its children are registered."""

    def __init__(self, model: PreTrainedModel, probe: Probe, embedding: nn.Module) -> None:
        self.model = model
        self.embedding = embedding
        self._output_type = probe.output_type
        self._run_backbone = probe.backbone.forward
        self._states: torch.Tensor | None = None
        probe.backbone.__dict__["forward"] = self._forward_backbone
        model.config._attn_implementation = PAGED

    def hidden(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] at positions [n] -> the same shape, after the last norm."""
        output = self._run_backbone(
            inputs_embeds=x[None], position_ids=positions[None], use_cache=False
        )
        return output[0][0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size].

        The model's own forward contains the code around the head (scaling, soft caps). It runs with
        these states in place of its backbone's output.
        """
        self._states = states[None]
        try:
            logits: torch.Tensor = self.model(inputs_embeds=self._states, use_cache=False).logits[0]
        finally:
            self._states = None
        return logits

    def _forward_backbone(self, *args: Any, **kwargs: Any) -> Any:
        if self._states is not None:
            return self._output_type(last_hidden_state=self._states)
        return self._run_backbone(*args, **kwargs)


def _construct(build: Build, name: str, raw: Mapping[str, Any]) -> PreTrainedModel:
    """The model on the meta device: modules and shapes, without data."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise ModelError(f"config.json: transformers does not know the model_type {model_type!r}")
    model_class = getattr(transformers, name)
    if not model_class._can_set_attn_implementation():
        raise refusal(name, "computes attention in a way of its own, not through the interface")
    # The linear method handles quantization.
    settings = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(settings)
        with torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(
                config, dtype=build.dtype, attn_implementation=PROBE
            )
            model.train(False)
    except Exception as error:  # third-party code may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())  # which may have several lines
        raise ModelError(f"config.json: transformers cannot make {name} of it: {why}") from error
    return model


def _check_positions(config: Any, name: str, max_model_len: int) -> None:
    """Refuse positions that depend on other requests in the batch, or that do not exist."""
    rotary = list(_rotary_settings(getattr(config, "rope_parameters", None)))
    longest = None if rotary else getattr(config, "max_position_embeddings", None)
    for settings in rotary:
        kind = settings["rope_type"]
        if kind == "dynamic":
            raise refusal(
                name,
                "has rotary frequencies (rope_type dynamic) that change with the longest request "
                "of a batch",
            )
        if kind == "longrope":
            longest = settings.get("original_max_position_embeddings")
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len must be at most {longest} for {name}, which runs on transformers' "
            f"implementation, got {max_model_len}"
        )


def _rotary_settings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The rope settings of all layers, or of each kind of layer."""
    if isinstance(value, Mapping):
        if isinstance(value.get("rope_type"), str):
            yield value
        for inner in value.values():
            yield from _rotary_settings(inner)


def _ignored(model: PreTrainedModel) -> tuple[str, ...]:
    tied = (rf"^{name}$".replace(".", r"\.") for name in model.all_tied_weights_keys)
    return (
        r"\.rotary_emb\.inv_freq$",
        *sorted(model._keys_to_ignore_on_load_unexpected or ()),
        *tied,
    )


def _attention(build: Build, path: str, call: AttentionCall) -> Attention:
    attention = Attention(
        build,
        path,
        call.num_heads,
        call.num_kv_heads,
        call.head_dim,
        call.scale,
        call.window,
        softcap=call.softcap,
    )
    if call.sinks is not None:  # a parameter of transformers' module, which loads it
        attention.extras["sinks"] = call.module.get_parameter(call.sinks)
    return attention


def _attend_paged(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, n, head_dim]
    key: torch.Tensor,  # [1, kv_heads, n, head_dim]
    value: torch.Tensor,
    attention_mask: None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    attention = module.paged_attention
    assert isinstance(attention, Attention)
    attended: torch.Tensor = attention(*rows)  # [n, heads * head_dim]
    return attended.view(1, *rows[0].shape), None


def _attend_alone(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Let each token see only itself, through its rotated query, so that its position matters."""
    repeated = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (repeated * query.sigmoid()).transpose(1, 2).contiguous(), None


AttentionInterface.register(PAGED, _attend_paged)
AttentionInterface.register(ALONE, _attend_alone)
