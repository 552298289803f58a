"""vLLM's place for the types of logprobs."""

from penstock.protocol.outputs import Logprob, LogprobsAtPosition

PromptLogprobs = list[LogprobsAtPosition | None]
SampleLogprobs = list[LogprobsAtPosition]

__all__ = ["Logprob", "PromptLogprobs", "SampleLogprobs"]
