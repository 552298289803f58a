"""Finds out what a transformers decoder needs from attention, by running it without weights.

The model runs once on the meta device, which computes only shapes. Its attention layers call a
function that records their arguments. Masks are replaced by descriptions of them. Whatever
Penstock's attention cannot do is refused here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from penstock.protocol.errors import ModelError

PROBE = "penstock_probe"
NUM_TOKENS = 3
LONGEST = 2**20  # tokens; a longer window counts as none
KINDS = ("full_attention", "sliding_attention")  # layer types in config.json
# Attention arguments that would change the result.
UNSUPPORTED = (
    "alibi", "bias", "block_indices", "block_mask", "head_mask", "indices", "position_bias",
    "score_mod",
)  # fmt: skip


@dataclass(frozen=True)
class CausalMask:
    """Stands in for a mask while a model is probed."""

    window: int | None  # visible tokens, including the token itself; None: all earlier ones


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks of attention."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: str | None  # the module's parameter


@dataclass(frozen=True)
class Probe:
    attention: dict[str, AttentionCall]  # by the module's path
    linears: frozenset[str]  # paths of nn.Linear layers that are called, not only read
    backbone: PreTrainedModel  # computes the hidden states for the head
    output_type: type[Any]  # of the backbone


class Unsupported(Exception):
    """Raised inside a probed model. The message completes the sentence "it ..."."""


def probe_model(model: PreTrainedModel, name: str) -> Probe:
    """Run a model on the meta device. Raises ModelError if Penstock cannot run it."""
    config = model.config.get_text_config()
    config._attn_implementation = PROBE
    experts = config._experts_implementation
    config._experts_implementation = "batched_mm"  # reads no values, which do not exist
    try:
        _check_kinds(model)
        with _Hooks(model) as hooks:
            _run(model)
    except Unsupported as error:
        raise refusal(name, str(error)) from error
    except Exception as error:  # third-party code may raise anything
        reason = f"fails when it runs without weights: {type(error).__name__}: {error}"
        raise refusal(name, reason[:300]) from error
    finally:
        config._experts_implementation = experts
    attention = {
        path: module.__dict__.pop("_penstock_call")
        for path, module in model.named_modules()
        if "_penstock_call" in module.__dict__
    }
    num_layers = config.num_hidden_layers
    if len(attention) != num_layers:
        raise refusal(
            name,
            f"has {num_layers} layers, but {len(attention)} that call transformers' attention "
            "interface: the others are recurrent, or compute attention in a way of their own",
        )
    if hooks.backbone is None or hooks.output_type is None:
        raise refusal(name, "has no model inside that gives hidden states")
    return Probe(attention, frozenset(hooks.linears), hooks.backbone, hooks.output_type)


def _check_kinds(model: PreTrainedModel) -> None:
    """The checks that need no run."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(map(str, kinds.difference(KINDS)))
    if unknown:
        raise Unsupported(f"has layers of kind {', '.join(unknown)}")


def _run(model: PreTrainedModel) -> None:
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    model(
        inputs_embeds=model.get_input_embeddings()(ids),
        position_ids=torch.zeros_like(ids),
        attention_mask=torch.ones_like(ids),  # otherwise transformers looks for packed sequences
        use_cache=False,
    )


def refusal(name: str, reason: str) -> ModelError:
    """The error for a model. `reason` completes the sentence "it ..."."""
    return ModelError(
        f"{name} cannot run on transformers' implementation (model_impl=transformers): it {reason}"
    )


class _Hooks:
    """Records which linear layers are called, and the outermost inner model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.linears: set[str] = set()
        self.backbone: PreTrainedModel | None = None
        self.output_type: type[Any] | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> _Hooks:
        for path, module in self.model.named_modules():
            if type(module) is nn.Linear:
                self._handles.append(module.register_forward_hook(self._linear_hook(path)))
            elif isinstance(module, PreTrainedModel) and path:
                self._handles.append(module.register_forward_hook(self._model_hook))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _linear_hook(self, path: str) -> Any:
        return lambda *_: self.linears.add(path)

    def _model_hook(self, module: PreTrainedModel, _: Any, output: Any) -> None:
        # Inner modules finish first, so the last one is the outermost.
        self.backbone, self.output_type = module, type(output)


def _note_call(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, n, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if "_penstock_call" in module.__dict__:
        raise Unsupported("uses one attention layer several times")
    if not isinstance(attention_mask, CausalMask):
        raise Unsupported("makes its attention masks itself")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise Unsupported("has attention that is not causal")
    if key.shape[2] != NUM_TOKENS or value.shape[2] != NUM_TOKENS:
        raise Unsupported("has cross-attention")
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        raise Unsupported(
            f"has values of {value.shape[3]} and keys of {key.shape[3]} dimensions per head"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"passes {name} to attention")
    module.__dict__["_penstock_call"] = AttentionCall(
        module=module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=scaling,
        window=attention_mask.window,
        softcap=softcap,
        sinks=_name_of(module, s_aux),
    )
    return torch.empty_like(query).transpose(1, 2), None


def _name_of(module: nn.Module, sinks: torch.Tensor | None) -> str | None:
    if sinks is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return name
    raise Unsupported("has attention sinks that are not a parameter of the layer")


def describe_mask(*, mask_function: Any, **_: Any) -> CausalMask:
    """The causal mask that a function of (batch, head, query, key) computes, from samples."""
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(LONGEST)
    num_seen = int(mask_function(zero, zero, torch.tensor(LONGEST - 1), keys).sum())
    window = num_seen if num_seen < LONGEST else None
    for query in (0, 1, num_seen // 2, num_seen - 1, num_seen, num_seen + 5, LONGEST - 2):
        if query >= LONGEST:
            continue
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        if not torch.equal(mask_function(zero, zero, torch.tensor(query), keys), expected):
            raise Unsupported("has attention masks that are neither causal nor a sliding window")
    return CausalMask(window)


AttentionInterface.register(PROBE, _note_call)
AttentionMaskInterface.register(PROBE, describe_mask)
