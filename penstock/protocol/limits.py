"""StepLimits: what bounds a step. Resolved once; whoever plans, runs or reports steps reads it."""

from __future__ import annotations

from typing import Literal

import msgspec

# media: the placeholders of an image; prompt: all tokens of a prompt
SpanKind = Literal["none", "media", "prompt"]


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # tokens in one step
    max_model_len: int  # tokens in one request, prompt and output together
    max_in_flight: int = 1  # steps launched before the first is collected
    num_stages: int = 1  # if several: a step has only requests whose tokens are all known
    num_drafts: int = 0  # draft tokens that a decoding request may bring to a step
    adapts_drafts: bool = False  # requests bring fewer drafts where more do not pay
    drafts_have_chances: bool = False  # the drafter heeds `StepPlan.least_chance`
    num_lookahead: int = 0  # tokens after those of a step for which the drafter needs KV blocks
    long_prefill_token_threshold: int = 0  # prompt tokens of one request in a step; 0: no limit
    enable_chunked_prefill: bool = True
    encoder_rows: int = 0  # embeddings of media that workers keep; 0: the model takes none
    encoder_width: int = 0  # of an embedding
    spans: SpanKind = "none"  # which tokens of prompts see each other, besides those before them
    max_span: int = 0  # the longest such span, which one step computes; 0: there are none

    @property
    def max_draft_rows(self) -> int:
        """Most rows of a step that belong to requests with drafts."""
        if self.num_drafts == 0:
            return 0
        most = max(self.max_num_batched_tokens, self.max_num_seqs)
        return min(self.max_num_seqs * (1 + self.num_drafts), most)
