"""vLLM's place for media. Penstock takes them without classes of its own."""

from typing import NoReturn

from penstock.protocol.vllm_fields import refuse_class


def __getattr__(name: str) -> NoReturn:
    refuse_class(__name__, name)
