"""The head of generative models: turns hidden states into logits, tokens and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.models.base import Hidden, Model
from penstock.ops.verification import FIRST_TOKEN, IS_FAULTED, NUM_NEW, Verified
from penstock.protocol.step import NewRequest, RequestResult, StepMasks, TokenLogprobs
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.forward import StepBatch, own_logits
from penstock.runner.layout import StepLayout
from penstock.runner.masks import mask_logits
from penstock.runner.prompt_logprobs import PromptLogprobsHead, PromptPiece
from penstock.runner.sampler import SampledTokens, Sampler
from penstock.runner.tables import IntArray, RequestTables

if TYPE_CHECKING:
    from penstock.runner.sampling_graphs import SamplingGraphs

FAULT = (
    "no next token can be chosen: the model gave NaN or infinite logits, or a mask or a custom "
    "logits processor leaves none"
)


@dataclass
class PendingLogits:
    """What `finish` needs. It is released once the tokens are chosen."""

    # [num_logits_rows, tokens of this rank]; None if no request samples
    logits: torch.Tensor | None
    prompt_pieces: dict[int, PromptPiece]  # by the request's index in the batch


@dataclass
class HeadOutput:
    """Results on their way to the host."""

    sampled: SampledTokens | None
    verified: torch.Tensor | None  # `Verified.results`, instead of the tokens in `sampled`
    prompt_pieces: dict[int, PromptPiece]  # by the request's index in the batch
    drafts: torch.Tensor | None = None  # [num_sampling, k], if somebody needs them
    num_drafts: IntArray | None = None  # [num_sampling] drafts of each; None: as many as planned


@dataclass
class GenerationHead:
    model: Model
    tables: RequestTables
    sampler: Sampler
    drafter: Drafter | None = None
    graphs: SamplingGraphs | None = None  # on a GPU
    # Of models with recurrent layers: `Steps.replay`.
    replay: Callable[[StepBatch, torch.Tensor], None] | None = None
    reports_drafts: bool = False  # of all requests, as other pipeline stages must know them

    def __post_init__(self) -> None:
        self.prompt_logprobs = PromptLogprobsHead(self.model, self.tables)
        self._with_grammar: set[int] = set()  # slots
        self._none_accepted = torch.zeros_like(self.tables.num_tokens)

    def add(self, slot: int, request: NewRequest) -> None:
        if request.sampling.is_masked:
            self._with_grammar.add(slot)
        self.sampler.add(slot, request)
        if self.drafter is not None:
            self.drafter.add(slot, request)
        self.prompt_logprobs.add(slot, request)

    def remove(self, slot: int) -> None:
        self._with_grammar.discard(slot)
        self.sampler.remove(slot)
        if self.drafter is not None:
            self.drafter.remove(slot)
        self.prompt_logprobs.remove(slot)

    def begin(
        self, hidden: Hidden, batch: StepBatch, logits: torch.Tensor | None = None
    ) -> PendingLogits:
        """Compute the logits of the sampling rows, and of prompt rows whose logprobs are requested.

        `logits`: those of the sampling rows, if the step already computed them.
        """
        pieces = self.prompt_logprobs.run(hidden, batch.layout)
        if not len(batch.layout.sampling):
            return PendingLogits(None, pieces)
        if logits is None:
            logits = own_logits(self.model, hidden, batch.logits_rows).float()
        return PendingLogits(logits, pieces)

    def finish(
        self, pending: PendingLogits, batch: StepBatch, masks: StepMasks | None
    ) -> HeadOutput:
        """Sample, verify drafts, write the tokens into the tables, draft the next ones."""
        if pending.logits is None:
            return HeadOutput(None, None, pending.prompt_pieces)
        allowed = None
        if masks is not None:
            keep_logits = self.sampler.wants_logprobs(batch.sampling_rows)
            shard = self.model.vocab_shard
            allowed = mask_logits(pending.logits, batch.layout, masks, keep_logits, shard)
        sampled, verified = self._sample(pending.logits, batch, allowed)
        if verified is not None and self.replay is not None:
            self.replay(batch, verified.num_accepted)
        output = HeadOutput(None, None, pending.prompt_pieces)
        if self.drafter is not None and batch.layout.num_drafts:
            slots, drafts = self._draft(self.drafter, batch, verified)
            output.num_drafts = drafts.counts
            token_ids = drafts.token_ids
            has_any = drafts.counts is None or bool(drafts.counts.any())
            if token_ids is not None and (masks is not None or has_any):
                self.tables.write_drafts(slots, token_ids)
            # Padding is reported too, and the tables hold what is reported.
            if masks is not None or (self.reports_drafts and has_any):
                if token_ids is None:
                    token_ids = self.tables.read_drafts(slots, batch.layout.num_drafts)
                output.drafts = token_ids.to("cpu", non_blocking=True)
        if verified is None:
            output.sampled = sampled.to_host()
        else:
            output.sampled = sampled.to_host(with_tokens=False)
            output.verified = verified.results.to("cpu", non_blocking=True)
        return output

    def _sample(
        self, logits: torch.Tensor, batch: StepBatch, allowed: torch.Tensor | None
    ) -> tuple[SampledTokens, Verified | None]:
        """Choose tokens and append those that are kept to the tables."""
        rows, has_drafts = batch.sampling_rows, batch.layout.has_drafts
        if self.graphs is not None and allowed is None:
            found = self.graphs.sample(logits, rows, has_drafts)
            if found is not None:
                sampled, verified = found
                num = len(batch.layout.sampling)
                return sampled, None if verified is None else verified[:num]
        sampled = self.sampler.sample(logits, rows, allowed)
        if has_drafts:
            tokens, faulted = sampled.token_ids, sampled.faulted
            return sampled, self.tables.verify(batch.samples, tokens, faulted)
        self.tables.append_tokens(rows.slots, sampled.token_ids)
        return sampled, None

    def _draft(
        self, drafter: Drafter, batch: StepBatch, verified: Verified | None
    ) -> tuple[torch.Tensor, Drafts]:
        """Let the drafter propose what comes next. Returns the slots of the requests, too."""
        layout = batch.layout
        if verified is None:
            slots, last_rows = batch.sampling_rows.slots, batch.logits_rows
            num_accepted = self._none_accepted[: len(slots)]
        else:
            slots, last_rows = verified.slots, verified.last_rows
            num_accepted = verified.num_accepted
        host_slots = layout.slots
        if len(layout.sampling) < len(host_slots):
            host_slots = host_slots[layout.sampling]
        step = DraftStep(
            self.tables, slots, host_slots, last_rows, num_accepted,
            layout.num_drafts, layout.least_chance,
        )  # fmt: skip
        return slots, drafter.propose(step)

    def results(self, output: HeadOutput, layout: StepLayout) -> list[RequestResult]:
        """One result per scheduled request, in row order.

        The copies to the host must be complete.
        """
        if self._is_plain(output):
            return self._plain_results(output, layout)
        results = []
        kept = self._kept(output, layout)
        errors, logprobs = _errors_and_logprobs(output.sampled)
        drafts = self._drafts_by_request(output, layout)
        num_drafts: dict[int, int] = {}
        if output.num_drafts is not None:
            counts = output.num_drafts.tolist()
            num_drafts = dict(zip(layout.sampling.tolist(), counts, strict=True))
        for index, item in enumerate(layout.requests):
            tokens, first, is_faulted = kept.get(index, ([], 0, False))
            rows = range(first, first + len(tokens))
            fault = None
            if is_faulted:
                fault = next((errors[row] for row in rows if row in errors), FAULT)
            piece = output.prompt_pieces.get(index)
            results.append(
                RequestResult(
                    request_id=item.request_id,
                    incarnation=item.incarnation,
                    token_ids=tokens,
                    logprobs=[logprobs[row] for row in rows if row in logprobs],
                    prompt_logprobs=piece.to_protocol() if piece else None,
                    fault=fault,
                    drafts=drafts.get(index, []),
                    num_drafts=num_drafts.get(index),
                )
            )
        return results

    def _drafts_by_request(self, output: HeadOutput, layout: StepLayout) -> dict[int, list[int]]:
        """The drafts that each request with a grammar, or every request, verifies next."""
        if output.drafts is None:
            return {}
        return {
            index: drafts
            for index, drafts in zip(layout.sampling.tolist(), output.drafts.tolist(), strict=True)
            if self.reports_drafts or int(layout.slots[index]) in self._with_grammar
        }

    def _is_plain(self, output: HeadOutput) -> bool:
        """Whether each request got tokens and nothing else, as in nearly every step."""
        sampled = output.sampled
        if sampled is None or output.prompt_pieces:
            return False
        if output.drafts is not None or sampled.errors or sampled.logprobs is not None:
            return False
        if output.verified is None:
            return not sampled.faulted.any()
        return not output.verified[:, IS_FAULTED].any()

    def _plain_results(self, output: HeadOutput, layout: StepLayout) -> list[RequestResult]:
        tokens = self._tokens(output, layout)
        counts: list[int | None] = [None] * len(tokens)
        if output.num_drafts is not None:
            counts = output.num_drafts.tolist()
        sampled = zip(tokens, counts, strict=True)
        results = []
        for item in layout.requests:
            token_ids, num_drafts = next(sampled) if item.samples else ([], None)
            results.append(
                RequestResult(
                    request_id=item.request_id,
                    incarnation=item.incarnation,
                    token_ids=token_ids,
                    num_drafts=num_drafts,
                )
            )
        return results

    def _tokens(self, output: HeadOutput, layout: StepLayout) -> list[list[int]]:
        """The new tokens of each sampling request."""
        assert output.sampled is not None
        if output.verified is None:
            return [[token] for token in output.sampled.token_ids.tolist()]
        # The host's upper bound counted every draft as accepted.
        num_new, own = output.verified[:, NUM_NEW].numpy(), layout.sampling
        rejected = layout.rows_per_sample - num_new
        self.tables.lower_bounds(layout.slots[own], layout.tenancies[own], rejected)
        rows = output.verified.tolist()
        return [row[FIRST_TOKEN : FIRST_TOKEN + row[NUM_NEW]] for row in rows]

    def _kept(
        self, output: HeadOutput, layout: StepLayout
    ) -> dict[int, tuple[list[int], int, bool]]:
        """By the index of each sampling request: its new tokens, their first row, any fault."""
        if output.sampled is None:
            return {}
        faulted = output.sampled.faulted
        if output.verified is not None:
            faulted = output.verified[:, IS_FAULTED].bool()
        kept = zip(
            self._tokens(output, layout),
            layout.sample_starts[:-1].tolist(),
            faulted.tolist(),
            strict=True,
        )
        return dict(zip(layout.sampling.tolist(), kept, strict=True))


def _errors_and_logprobs(
    sampled: SampledTokens | None,
) -> tuple[dict[int, str], dict[int, TokenLogprobs]]:
    """By row, of the rows that have them."""
    if sampled is None:
        return {}, {}
    return sampled.errors, sampled.logprobs.by_row() if sampled.logprobs else {}
