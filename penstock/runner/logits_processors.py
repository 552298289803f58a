"""Custom logits processors: the plugin interface, and loading and running plugins.

A processor runs after the built-in masks and the logit bias, and before penalties, temperature and
truncation. It receives only rows of requests that it agreed to handle. Other requests neither pay
for it nor are affected by it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.protocol.errors import ConfigError
from penstock.protocol.step import NewRequest
from penstock.runner.plugins import find_class
from penstock.runner.sampling_tables import to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessorRows:
    """The rows passed to a processor. A request may have several, at consecutive positions."""

    slots: Tensor  # [rows] int64, on the device
    positions: Tensor  # [rows] int64, on the device: position of the token to be sampled
    host_slots: NDArray[np.int64]  # [rows], the same as slots
    token_ids: list[list[int]] | None  # prompt and output before each row, if `needs_tokens`


class LogitsProcessor(ABC):
    """Changes the logits of requests that ask for it, usually in `SamplingParams.extra_args`.

    A processor keeps its state by slot. What `apply` does to a row may depend only on the row's
    slot and position, so that results do not depend on the batch. The constructor takes no
    arguments.
    """

    needs_tokens: ClassVar[bool] = False
    """Whether `apply` needs the tokens so far on the host.

    Steps with such a request cannot overlap with the step before them.
    """

    @abstractmethod
    def add(self, slot: int, request: NewRequest) -> bool:
        """A request enters a slot. Returns whether this processor handles its rows.

        An exception fails this request only.
        """

    def remove(self, slot: int) -> None:  # noqa: B027 - a processor without state needs none
        """The request leaves the slot. Called only if `add` returned True."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: ProcessorRows) -> Tensor:
        """Return the new logits, [rows, vocab] float32 like the input, which may be changed in
        place.

        If this raises, it is called again for each row alone. Only rows that raise again fail.
        """


class Rows(Protocol):
    """The fields of `SamplingRows` that `ProcessorHost` reads."""

    @property
    def slots(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def host_slots(self) -> NDArray[np.int64]: ...
    @property
    def max_position(self) -> int: ...


class ProcessorHost:
    """Runs processors, which may raise anything. Only the requests that they raise for fail."""

    def __init__(self, processors: Sequence[LogitsProcessor], num_slots: int) -> None:
        self._processors = tuple(processors)
        self._handled = np.zeros((len(self._processors), num_slots), dtype=bool)
        self._refused: dict[int, str] = {}  # by slot: why a processor refused its request

    @property
    def has_refused(self) -> bool:
        return bool(self._refused)

    def add(self, slot: int, request: NewRequest) -> bool:
        """A request enters a slot. Returns whether any processor handles it."""
        for number, processor in enumerate(self._processors):
            try:
                handled = processor.add(slot, request)
                if not isinstance(handled, bool):
                    raise TypeError(f"add must return True or False, got {handled!r}")
            except Exception as error:
                logger.exception("logits processor refused request %s", request.request_id)
                self._refused[slot] = _describe(processor, error)
                continue
            self._handled[number, slot] = handled
        return bool(self._handled[:, slot].any())

    def remove(self, slot: int) -> None:
        for number in np.flatnonzero(self._handled[:, slot]):
            try:
                self._processors[number].remove(slot)
            except Exception:  # the slot is left all the same
                logger.exception("logits processor failed to remove slot %d", slot)
        self._handled[:, slot] = False
        self._refused.pop(slot, None)

    def refused(self, host_slots: NDArray[np.int64]) -> dict[int, str]:
        """By row: why a processor refused its request."""
        if not self._refused:
            return {}
        slots = enumerate(host_slots.tolist())
        return {row: self._refused[slot] for row, slot in slots if slot in self._refused}

    def run(self, work: Tensor, rows: Rows, token_ids: Tensor) -> dict[int, str]:
        """Change logits [rows, vocab] in place. Returns error messages by row."""
        errors: dict[int, str] = {}
        for number, processor in enumerate(self._processors):
            users = np.flatnonzero(self._handled[number, rows.host_slots])
            if len(users) == 0:
                continue
            try:
                self._apply(processor, work, rows, users, token_ids)
            except Exception:  # find the rows that it fails for
                for user in users:
                    try:
                        self._apply(processor, work, rows, user[None], token_ids)
                    except Exception as error:
                        logger.exception("logits processor failed")
                        errors[int(user)] = _describe(processor, error)
        return errors

    def _apply(
        self,
        processor: LogitsProcessor,
        work: Tensor,
        rows: Rows,
        users: NDArray[np.int64],
        token_ids: Tensor,
    ) -> None:
        """Run a processor on a copy of some rows, so that an exception changes no logits."""
        index = to_device(users, work.device)
        slots, positions = rows.slots[index], rows.positions[index]
        history = None
        if processor.needs_tokens:
            tokens = token_ids[slots, : rows.max_position].tolist()
            history = [row[:end] for row, end in zip(tokens, positions.tolist(), strict=True)]
        given = work[index]
        chosen = ProcessorRows(slots, positions, rows.host_slots[users], history)
        result = processor.apply(given, chosen)
        if not isinstance(result, Tensor) or result.shape != given.shape:
            raise TypeError(
                f"apply must return a tensor of shape {tuple(given.shape)}, "
                f"got {getattr(result, 'shape', result)!r}"
            )
        work[index] = result.to(device=work.device, dtype=work.dtype)


def _describe(processor: LogitsProcessor, error: Exception) -> str:
    return f"logits processor {type(processor).__name__} failed: {error!r}"


def load_processors(specs: Sequence[str | type]) -> list[LogitsProcessor]:
    """Construct processors from classes or "module:Class" strings.

    Raises `ConfigError` if one cannot be imported, is not a `LogitsProcessor`, or fails to
    construct.
    """
    return [
        _construct(find_class(spec, "logits processor") if isinstance(spec, str) else spec)
        for spec in specs
    ]


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
