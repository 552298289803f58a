"""SearchMethods: beam search of `LLM`, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from penstock.engine.beam_search import BeamSearch, reporting
from penstock.engine.lora_requests import LoRARequestOrList, with_adapters
from penstock.engine.offline_metrics import OfflineMetrics
from penstock.protocol.adapter import Adapter
from penstock.protocol.beam_search import BeamSearchOutput, BeamSearchParams
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import SamplingParams, check_int
from penstock.text.frontend import Frontend, PreparedRequest
from penstock.text.prompts import Prompt, with_priorities


class SearchMethods:
    frontend: Frontend
    _ids: itertools.count[int]
    _metrics: OfflineMetrics | None

    if TYPE_CHECKING:

        def _adapters_of(self, given: LoRARequestOrList, count: int) -> list[Adapter | None]: ...

        def _prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest: ...

        def _run(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]: ...

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequestOrList = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest completions of each prompt by beam search.

        `concurrency_limit` is the most prompts to search at once. Raises `RequestFault` if a step
        fails.
        """
        self.frontend.check_beams()
        if concurrency_limit is not None:
            check_int("concurrency_limit", concurrency_limit, 1, 2**31 - 1)
        items = with_priorities(prompts, None)
        adapters = self._adapters_of(lora_request, len(items))
        limits = SamplingParams(temperature=0, max_tokens=params.max_tokens, n=params.beam_width)
        requests = with_adapters([self._prepare(item, limits) for item, _ in items], adapters)
        searches = [BeamSearch(request.children, params) for request in requests]
        report = (lambda records: None) if self._metrics is None else self._metrics.report_search
        ids = map(str, self._ids)
        at_once = concurrency_limit or len(searches) or 1
        disable = None if use_tqdm else True  # None: unless it is a terminal
        bar = tqdm(total=len(searches), desc="Beam search", disable=disable)
        with bar as progress, reporting(searches, report):
            for start in range(0, len(searches), at_once):
                running = searches[start : start + at_once]
                while running:
                    steps = [search.requests(ids) for search in running]
                    outputs = iter(self._run([one for step in steps for one in step], False))
                    for search, step in zip(running, steps, strict=True):
                        search.advance(list(itertools.islice(outputs, len(step))))
                    still = [search for search in running if search.running]
                    progress.update(len(running) - len(still))
                    running = still
        tokenizer = self.frontend.tokenizer
        results = [BeamSearchOutput(search.best()) for search in searches]
        for result in results:
            for sequence in result.sequences:
                if tokenizer is not None:
                    sequence.text = tokenizer.decode(sequence.tokens)
        return results
