"""What streams of both APIs share: how usage is counted and shown, and how they are documented."""

from __future__ import annotations

from typing import Any

from penstock.protocol.outputs import RequestOutput
from penstock.server.openai.logprobs import usage
from penstock.server.openai.protocol import StreamOptions, Usage

EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream, chunks of it as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


class UsageCounter:
    """Counts tokens as deltas pass, and knows when the client wants to see the count."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = bool(options and options.include_usage)
        self.in_every_chunk = bool(options and options.continuous_usage_stats)
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens and cached tokens, by index
        self._num_completion = 0

    def count(self, index: int, output: RequestOutput) -> None:
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._num_completion += sum(len(item.token_ids) for item in output.outputs)

    def so_far(self) -> Usage:
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        num_cached = sum(cached for _, cached in self._prompts.values())
        return usage(num_prompt, self._num_completion, num_cached)
