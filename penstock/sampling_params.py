"""vLLM's place for sampling parameters."""

from penstock.protocol.beam_search import BeamSearchParams
from penstock.protocol.sampling import RequestOutputKind, SamplingParams
from penstock.protocol.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
