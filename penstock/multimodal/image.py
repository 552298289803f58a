"""vLLM's place for images. Penstock takes those of Pillow."""

from typing import NoReturn

from penstock.protocol.vllm_fields import refuse_class


def __getattr__(name: str) -> NoReturn:
    refuse_class(__name__, name)
