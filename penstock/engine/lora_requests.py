"""LoRARequests: finds the adapters that callers of `LLM` and `AsyncLLM` name. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.config import LoRAConfig
from penstock.loading.adapters.source import CONFIG, WEIGHTS, adapter_digest, locate_adapter
from penstock.protocol.adapter import Adapter, LoRARequest
from penstock.protocol.errors import InputError
from penstock.protocol.request import EngineRequest
from penstock.text.frontend import PreparedRequest

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore

Stamp = tuple[tuple[int, int], ...]  # size and time of change of each file
LoRARequestOrList = LoRARequest | Sequence[LoRARequest | None] | None


class LoRARequests:
    """Identifies adapters by their content, which is read once until a file changes."""

    def __init__(self, config: LoRAConfig) -> None:
        self._config = config
        self._known: dict[str, tuple[Stamp, Path, str]] = {}  # by path as given: path, digest
        self.loaded: set[str] = set()  # digests, at some time

    def of_prompts(self, given: LoRARequestOrList, count: int) -> list[Adapter | None]:
        """The adapter of each prompt. `given` is for all of them, or one for each."""
        if given is None or isinstance(given, LoRARequest):
            return [self.find(given)] * count
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
            raise InputError(
                f"lora_request must be one LoRARequest, or a list of one per prompt ({count}), got "
                f"{given!r:.80}",
                "lora_request",
            )
        return [self.find(item) for item in given]

    def find(self, given: LoRARequest | None) -> Adapter | None:
        """Find an adapter and read its files, if it is not known. Slow: it may be fetched.

        Raises `InputError` if LoRA is off, and `AdapterError` if there is no such adapter.
        """
        if given is None:
            return None
        if not isinstance(given, LoRARequest):
            raise InputError(
                f"lora_request must be a LoRARequest, got {given!r:.80}", "lora_request"
            )
        if not self._config.enable_lora:
            raise InputError("lora_request needs enable_lora=True", "lora_request")
        if not given.lora_name or not given.lora_path:
            raise InputError("lora_request needs lora_name and lora_path", "lora_request")
        known = self._known.get(given.lora_path)
        path = locate_adapter(given.lora_path) if known is None else known[1]
        stamp = _stamp(path)
        if known is None or known[0] != stamp:
            known = self._known[given.lora_path] = (stamp, path, adapter_digest(path))
        return Adapter(given.lora_name, known[2], str(path))

    def load(
        self,
        given: LoRARequestOrList,
        count: int,
        engine: EngineCore,
        step: Callable[[], object],
    ) -> list[Adapter | None]:
        """Like `of_prompts`. Adapters that were never loaded are, so that errors come early.

        Raises `InputError` if one cannot be loaded. `step` runs a step of the engine. Adapters that
        were loaded before may have been evicted since. Their requests load them again.
        """
        adapters = self.of_prompts(given, count)
        new = {item.digest: item for item in adapters if item and item.digest not in self.loaded}
        loads = [engine.load_adapter(item) for item in new.values()]
        while not all(load.done() for load in loads):
            step()
        for load in loads:
            load.result()
        self.loaded.update(new)
        return adapters


def with_adapters(
    requests: Sequence[PreparedRequest], adapters: Sequence[Adapter | None]
) -> list[PreparedRequest]:
    """The same requests, to be run with these adapters."""
    return [
        replace(request, children=with_adapter(request.children, adapter))
        for request, adapter in zip(requests, adapters, strict=True)
    ]


def with_adapter(requests: Sequence[EngineRequest], adapter: Adapter | None) -> list[EngineRequest]:
    """The same requests, to be run with this adapter."""
    if adapter is None:
        return list(requests)
    return [msgspec.structs.replace(request, adapter=adapter) for request in requests]


def _stamp(path: Path) -> Stamp:
    files = [path / CONFIG, path / WEIGHTS] if path.is_dir() else [path]
    found = [os.stat(file) for file in files if file.exists()]
    return tuple((file.st_size, file.st_mtime_ns) for file in found)
