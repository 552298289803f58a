"""The head of generative models: turns hidden states into logits, tokens and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.models.base import Hidden, Model
from penstock.protocol.step import NewRequest, RequestResult, StepMasks, TokenLogprobs
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.forward import StepBatch
from penstock.runner.forward import logits as logits_of
from penstock.runner.layout import StepLayout
from penstock.runner.masks import mask_logits
from penstock.runner.prompt_logprobs import PromptLogprobsHead, PromptPiece
from penstock.runner.sampler import SampledTokens, Sampler
from penstock.runner.sampling_tables import to_device
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

    logits: torch.Tensor | None  # [num_logits_rows, vocab_size]; None if no request samples
    prompt_pieces: dict[int, PromptPiece]  # by the request's index in the batch


@dataclass
class HeadOutput:
    """Results on their way to the host."""

    sampled: SampledTokens | None
    num_new: torch.Tensor | None  # [num_sampling] new tokens of each request; None: one each
    prompt_pieces: dict[int, PromptPiece]  # by the request's index in the batch
    drafts: torch.Tensor | None = None  # [num_sampling, k], if a grammar needs them
    num_drafts: IntArray | None = None  # [num_sampling] drafts of each; None: as many as planned


class GenerationHead:
    def __init__(
        self,
        model: Model,
        tables: RequestTables,
        sampler: Sampler,
        drafter: Drafter | None = None,
    ) -> None:
        self.model = model
        self.tables = tables
        self.sampler = sampler
        self.drafter = drafter
        self.graphs: SamplingGraphs | None = None  # on a GPU
        self.prompt_logprobs = PromptLogprobsHead(model, tables)
        self._with_grammar: set[int] = set()  # slots

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
            logits = logits_of(self.model, hidden, batch.logits_rows).float()
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
            allowed = mask_logits(pending.logits, batch.layout, masks, keep_logits)
        slots = batch.sampling_rows.slots
        has_drafts = batch.layout.has_drafts
        sampled = None
        if self.graphs is not None and allowed is None and not has_drafts:
            sampled = self.graphs.sample(pending.logits, batch.sampling_rows)
        is_entered = sampled is not None
        if sampled is None:
            sampled = self.sampler.sample(pending.logits, batch.sampling_rows, allowed)
        num_new = None
        if not has_drafts and not is_entered:
            self.tables.append_tokens(slots, sampled.token_ids)
        elif has_drafts:
            num_new = self._verify(sampled.token_ids, batch)
        output = HeadOutput(sampled, num_new, pending.prompt_pieces)
        if self.drafter is not None and batch.layout.num_drafts:
            drafts = self._draft(self.drafter, batch, num_new)
            output.num_drafts = drafts.counts
            if masks is not None:
                output.drafts = drafts.token_ids.to("cpu", non_blocking=True)
        output.sampled = sampled.to_host()
        if num_new is not None:
            output.num_new = num_new.to("cpu", non_blocking=True)
        return output

    def _draft(self, drafter: Drafter, batch: StepBatch, num_new: torch.Tensor | None) -> Drafts:
        """Let the drafter propose what comes next, and write it behind the known tokens."""
        layout, first_rows = batch.layout, batch.logits_rows
        slots = batch.sampling_rows.slots
        if num_new is None:
            num_accepted = torch.zeros_like(slots)
        else:
            first = to_device(layout.first_samples, slots.device)
            num_accepted, slots, first_rows = num_new - 1, slots[first], first_rows[first]
        step = DraftStep(
            self.tables,
            slots,
            layout.slots[layout.sampling],
            first_rows + num_accepted,
            num_accepted,
            layout.num_drafts,
        )
        drafts = drafter.propose(step)
        if drafts.counts is None or drafts.counts.any():
            self.tables.write_drafts(slots, drafts.token_ids)
        return drafts

    def _verify(self, token_ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Keep each request's sampled tokens up to the first one that differs from its draft.

        Returns how many tokens each request keeps.
        A draft is accepted if and only if it equals the token that the request's own noise selects.
        Therefore the output is the same with and without speculation.
        """
        device = token_ids.device
        rows = to_device(batch.layout.rows_per_sample, device)  # [n]
        first = to_device(batch.layout.first_samples, device)
        column = torch.arange(int(batch.layout.rows_per_sample.max()), device=device)
        exists = column < rows[:, None]  # [n, 1 + drafts]
        index = torch.where(exists, first[:, None] + column, first[:, None])
        sampled = token_ids[index]
        drafted = batch.inputs.token_ids[batch.logits_rows][index][:, 1:]
        held = (sampled[:, :-1] == drafted) & exists[:, 1:]
        num_accepted = held.int().cumprod(dim=1).sum(dim=1)
        rejected = rows - 1 - num_accepted
        slots = batch.sampling_rows.slots[first]
        self.tables.append_verified(slots, sampled, num_accepted + 1, rejected)
        return num_accepted + 1

    def results(self, output: HeadOutput, layout: StepLayout) -> list[RequestResult]:
        """One result per scheduled request, in row order.

        The copies to the host must be complete.
        """
        if self._is_plain(output):
            return self._plain_results(output, layout)
        results = []
        rows = self._rows_by_request(output, layout)
        token_ids, faulted, errors, logprobs = _on_host(output.sampled)
        drafts = self._drafts_by_request(output, layout)
        num_drafts: dict[int, int] = {}
        if output.num_drafts is not None:
            counts = output.num_drafts.tolist()
            num_drafts = dict(zip(layout.sampling.tolist(), counts, strict=True))
        for index, item in enumerate(layout.requests):
            own = rows.get(index, range(0))
            fault = next((errors.get(row, FAULT) for row in own if faulted[row]), None)
            piece = output.prompt_pieces.get(index)
            results.append(
                RequestResult(
                    request_id=item.request_id,
                    incarnation=item.incarnation,
                    token_ids=[token_ids[row] for row in own],
                    logprobs=[logprobs[row] for row in own if row in logprobs],
                    prompt_logprobs=piece.to_protocol() if piece else None,
                    fault=fault,
                    drafts=drafts.get(index, []),
                    num_drafts=num_drafts.get(index),
                )
            )
        return results

    def _drafts_by_request(self, output: HeadOutput, layout: StepLayout) -> dict[int, list[int]]:
        """The drafts that each request with a grammar verifies in its next step."""
        if output.drafts is None:
            return {}
        return {
            index: drafts
            for index, drafts in zip(layout.sampling.tolist(), output.drafts.tolist(), strict=True)
            if int(layout.slots[index]) in self._with_grammar
        }

    def _is_plain(self, output: HeadOutput) -> bool:
        """Whether each request got at most one token and nothing else, as in nearly every step."""
        sampled = output.sampled
        if sampled is None or output.num_new is not None or output.prompt_pieces:
            return False
        if output.drafts is not None or output.num_drafts is not None:
            return False
        return not sampled.errors and sampled.logprobs is None and not sampled.faulted.any()

    def _plain_results(self, output: HeadOutput, layout: StepLayout) -> list[RequestResult]:
        assert output.sampled is not None
        tokens = iter(output.sampled.token_ids.tolist())
        return [
            RequestResult(
                request_id=item.request_id,
                incarnation=item.incarnation,
                token_ids=[next(tokens)] if item.samples else [],
            )
            for item in layout.requests
        ]

    def _rows_by_request(self, output: HeadOutput, layout: StepLayout) -> dict[int, range]:
        """The logits rows whose tokens each sampling request keeps."""
        if output.sampled is None:
            return {}
        rows, first = layout.rows_per_sample, layout.first_samples
        if output.num_new is None:
            num_new = np.ones_like(rows)
        else:
            num_new = output.num_new.numpy()
        # The host's upper bound counted every draft as accepted.
        rejected = rows - num_new
        own = layout.sampling
        self.tables.lower_bounds(layout.slots[own], layout.tenancies[own], rejected)
        return {
            index: range(start, start + count)
            for index, start, count in zip(
                own.tolist(), first.tolist(), num_new.tolist(), strict=True
            )
        }


def _on_host(
    sampled: SampledTokens | None,
) -> tuple[list[int], list[bool], dict[int, str], dict[int, TokenLogprobs]]:
    """Tokens and faults by row; errors and logprobs of the rows that have them."""
    if sampled is None:
        return [], [], {}, {}
    logprobs = sampled.logprobs.by_row() if sampled.logprobs else {}
    return sampled.token_ids.tolist(), sampled.faulted.tolist(), sampled.errors, logprobs
