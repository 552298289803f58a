"""What a device is and can do."""

from typing import TYPE_CHECKING, NoReturn

from penstock.protocol.vllm_fields import refuse_class

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
