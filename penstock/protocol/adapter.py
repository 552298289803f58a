"""Adapters: how a request names a LoRA adapter, and what workers do with one."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. Its digest covers its content: other weights are another adapter."""

    name: str  # under which clients ask for it
    digest: str
    path: str  # a folder of PEFT's or a GGUF file, readable by all workers


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter for a request of the Python API, with vLLM's names.

    `lora_path` is a folder of PEFT's, a GGUF file, a hub ID or ``pypi:package==version``. The
    adapter is identified by its content: `lora_int_id` is accepted and not used.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


class FetchAdapter(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Begin to load an adapter into host memory, beside the steps. Ends as a `FinishedJob`."""

    adapter: Adapter
    lane: int = 0  # of the replica whose requests use it: see `LaneExecutor`


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Copy an adapter from host memory into a device slot, before the step."""

    digest: str
    slot: int
    lane: int = 0


class DropAdapter(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Free an adapter's host memory. Its device slots stay valid."""

    digest: str
    lane: int = 0


AdapterJob = FetchAdapter | PlaceAdapter | DropAdapter


class FinishedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job that ran beside the steps has ended."""

    digest: str
    error: str | None = None  # why it failed, for the client
    changes_tower: bool = False  # the embeddings of media depend on the adapter
    lane: int = 0  # of the replica that gave the job
