"""vLLM's place for logits processors, whose interface is another one here."""

from typing import NoReturn

from penstock.protocol.vllm_fields import refuse_class


def __getattr__(name: str) -> NoReturn:
    refuse_class(__name__, name)
