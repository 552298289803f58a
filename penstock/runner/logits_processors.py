"""Custom logits processors: what a plugin implements, and how plugins are found.

A processor sees the logits after the built-in masks and the logit bias, before penalties,
temperature and truncation. It is handed only rows of requests that it said it handles, so other
requests neither pay for it nor can be harmed by it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.protocol.errors import ConfigError
from penstock.protocol.step import NewRequest


@dataclass(frozen=True)
class ProcessorRows:
    """The rows handed to a processor. One request may have several, at consecutive positions."""

    slots: Tensor  # [rows] int64, on the device
    positions: Tensor  # [rows] int64, on the device: where the token to be sampled will stand
    host_slots: NDArray[np.int64]  # [rows], the same as slots
    token_ids: list[list[int]] | None  # prompt and output before each row, if `needs_tokens`


class LogitsProcessor(ABC):
    """Changes logits of requests that ask for it, mostly through `SamplingParams.extra_args`.

    State is kept by slot; what `apply` does to a row may depend on its slot and position only, so
    that results do not depend on the batch. Constructed without arguments.
    """

    needs_tokens: ClassVar[bool] = False
    """Whether `apply` needs the tokens so far on the host. A step with such a request cannot
    overlap with the one before it."""

    @abstractmethod
    def add(self, slot: int, request: NewRequest) -> bool:
        """A request enters a slot. Returns whether this processor handles its rows; what it raises
        fails this request."""

    def remove(self, slot: int) -> None:  # noqa: B027 - a processor without state needs none
        """The request leaves the slot. Called only where `add` returned True."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: ProcessorRows) -> Tensor:
        """The new logits, [rows, vocab] float32 like the given ones, which it may change in place.

        If this raises, it is called again for each row alone, and only rows that raise then fail.
        """


def load_processors(specs: Sequence[str | type]) -> list[LogitsProcessor]:
    """Construct processors from classes or "module:Class" strings.

    Raises `ConfigError` for what cannot be imported, is no `LogitsProcessor` or does not construct.
    """
    return [_construct(_find(spec) if isinstance(spec, str) else spec) for spec in specs]


def _find(spec: str) -> object:
    module_name, separator, class_name = spec.partition(":")
    if not separator or not module_name or not class_name:
        raise ConfigError(f'logits processor must be "module:Class", got "{spec}"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a plugin's module may raise anything
        raise ConfigError(
            f'logits processor "{spec}": cannot import {module_name}: {error!r}'
        ) from error
    if not hasattr(module, class_name):
        raise ConfigError(f'logits processor "{spec}": {module_name} has no {class_name}')
    found: object = getattr(module, class_name)
    return found


def _construct(candidate: object) -> LogitsProcessor:
    if not (isinstance(candidate, type) and issubclass(candidate, LogitsProcessor)):
        raise ConfigError(
            f"logits processor must be a subclass of {LogitsProcessor.__module__}."
            f"{LogitsProcessor.__name__}, got {candidate!r}"
        )
    try:
        return candidate()
    except Exception as error:  # a plugin's constructor may raise anything
        raise ConfigError(
            f"logits processor {candidate.__name__} cannot be constructed: {error!r}"
        ) from error
