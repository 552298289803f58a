"""vLLM's place for what `LLM.beam_search` returns."""

from penstock.protocol.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
