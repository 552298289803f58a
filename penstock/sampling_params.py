"""vLLM's place for sampling parameters."""

from typing import NoReturn

from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.sampling import RequestOutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams
from penstock.protocol.vllm_fields import refuse_class

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> NoReturn:
    refuse_class(__name__, name)
