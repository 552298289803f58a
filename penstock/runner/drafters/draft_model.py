"""Method draft_model: a smaller model with the target's vocabulary drafts.

It reads tokens from the request tables when it proposes: first those that its cache lacks, then its
own drafts. It takes no part in the target's steps. So a step after which nothing is proposed costs
nothing, and its tokens are caught up with later.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.loading.tasks import choose_task
from penstock.models.assembly import load_model
from penstock.models.runtime import longest_context
from penstock.protocol.errors import ConfigError
from penstock.protocol.step import NewRequest, StepPlan
from penstock.runner.drafter import Drafts, DraftSetup, DraftStep
from penstock.runner.drafters.model import DraftBatch, ModelDrafter
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables
from penstock.text.tokenizer import load_tokenizer

NUM_COMPARED = 4096  # tokens: those of another tokenizer differ nearly everywhere
NO_TOKEN = -1

logger = logging.getLogger(__name__)


class DraftModelDrafter(ModelDrafter):
    def __init__(self, name: str, num_drafts: int, quantization: str | None = None) -> None:
        super().__init__(num_drafts)
        self._name = name
        self._quantization = quantization

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = (
            setup.config_of(self._name, self._quantization),
            setup.limits.max_model_len,
        )
        draft = resolve_source(own.model, own.load)
        if choose_task(own, draft) != "generate":
            raise ConfigError(f"the draft model {self._name} does not generate text")
        check_vocabulary(setup.config, setup.source, draft)
        num_positions = longest_context(draft.config)
        if num_positions < max_model_len:
            logger.warning(
                "The draft model's context is %d tokens: drafts end there, requests may have %d",
                num_positions, max_model_len,
            )  # fmt: skip
        model, dtypes, _ = load_model(own, draft, setup.platform, setup.draft_mesh, max_model_len)
        self.use(model, dtypes.kv, setup.max_rows, min(num_positions, max_model_len))

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        super().start(tables, memory, sampler)
        # By slot: how many leading tokens have rows in the cache, and the drafts behind them that
        # have rows, too. Those rows count where the drafts turned out to be the request's tokens.
        slots, device = len(tables.num_tokens), tables.device
        self._num_done = torch.zeros(slots, dtype=torch.int64, device=device)
        self._drafted = torch.full((slots, self.num_drafts), NO_TOKEN, device=device)
        # By KV group: blocks all of whose rows the draft layers have. A cached block may lack some,
        # if its request ended before the drafter had caught up.
        num_blocks = memory.layout.num_blocks
        self._is_full = {
            group: torch.zeros(num_blocks, dtype=torch.bool, device=device)
            for group in set(self._groups.values())
        }
        self._unchecked: set[int] = set()  # slots whose cached blocks were not looked at yet

    def add(self, slot: int, request: NewRequest) -> None:
        self._num_done[slot] = request.num_computed_tokens  # cached blocks have draft rows, too
        self._drafted[slot] = NO_TOKEN
        if request.num_computed_tokens:
            self._unchecked.add(slot)

    def remove(self, slot: int) -> None:
        self._unchecked.discard(slot)

    def take_blocks(self, plan: StepPlan) -> None:
        cached = {request.request_id: request.num_computed_tokens for request in plan.new_requests}
        for group, is_full in self._is_full.items():
            new: list[int] = []
            for item in plan.scheduled:
                if item.new_block_ids:
                    num_cached = cached.get(item.request_id, 0) // self._block_size(group)
                    new += item.new_block_ids[group][num_cached:]
            if new:
                is_full[to_device(np.array(new), is_full.device)] = False

    def propose(self, step: DraftStep) -> Drafts:
        everyone, num_drafts = self._batch(step), step.num_drafts
        if self._unchecked:
            self._check_cached(everyone)
        drafts = torch.zeros_like(everyone.slots)[:, None].repeat(1, num_drafts)
        device = drafts.device
        known = torch.stack([self._num_valid(everyone), everyone.num_tokens, everyone.room])
        num_valid, num_tokens, room = known.cpu().numpy()  # a GPU waits here
        # Requests that have no place for the next row, or too many rows to compute first, get none.
        counts = np.where(room < num_tokens, 0, num_tokens - num_valid)
        counts = self._share_rows(counts)
        reached = num_valid + counts
        has_drafts = reached == num_tokens
        order = np.argsort(counts > 1, kind="stable")  # requests with one row go first
        order = order[counts[order] > 0]
        if len(order):
            batch = everyone.take(order)
            logits = self._forward(batch, to_device(num_valid[order], device), counts[order])
            if has_drafts.any():
                drafts[to_device(order, device)] = self._draft(batch, logits, num_drafts)
        # The last draft has no row yet, and others may have no place for theirs.
        num_rows = np.where(has_drafts, np.clip(room - num_tokens, 0, num_drafts - 1), 0)
        has_row = torch.arange(num_drafts, device=device) < to_device(num_rows, device)[:, None]
        self._num_done[everyone.slots] = to_device(reached, device)
        self._mark_full(everyone, num_valid, reached)
        self._drafted[everyone.slots] = NO_TOKEN
        self._drafted[everyone.slots, :num_drafts] = drafts.masked_fill(~has_row, NO_TOKEN)
        if device.type != "cpu":
            return Drafts(drafts)  # the host plans ahead, and uses no counts
        num_good = np.where(has_drafts, np.clip(room - num_tokens + 1, 0, num_drafts), 0)
        return Drafts(drafts, None if (num_good == num_drafts).all() else num_good)

    def _num_valid(self, batch: DraftBatch) -> torch.Tensor:
        """How many leading tokens of each request have rows. The last token is never among them."""
        num_done, drafted = self._num_done[batch.slots], self._drafted[batch.slots]
        positions = num_done[:, None] + torch.arange(self.num_drafts, device=num_done.device)
        positions = positions.clamp(max=self._tables.token_ids.shape[1] - 1)
        held = drafted == self._tables.token_ids[batch.slots[:, None], positions]
        num_valid = num_done + held.int().cumprod(dim=1).sum(dim=1)
        return torch.minimum(num_valid, batch.num_tokens - 1)

    def _check_cached(self, batch: DraftBatch) -> None:
        """Count only the leading cached blocks of new requests that have all draft rows."""
        own = [i for i, slot in enumerate(batch.host_slots.tolist()) if slot in self._unchecked]
        self._unchecked.difference_update(batch.host_slots.tolist())
        index = to_device(np.array(own, dtype=np.int64), batch.slots.device)
        slots = batch.slots[index]
        for group, is_full in self._is_full.items():
            num_full = is_full[batch.block_tables[group][index]].int().cumprod(dim=1).sum(dim=1)
            num_rows = num_full * self._block_size(group)
            self._num_done[slots] = torch.minimum(self._num_done[slots], num_rows)

    def _mark_full(self, batch: DraftBatch, before: IntArray, reached: IntArray) -> None:
        for group, is_full in self._is_full.items():
            size = self._block_size(group)
            index = np.flatnonzero(reached // size > before // size)
            if len(index):
                where, end = (to_device(x, is_full.device) for x in (index, reached[index] // size))
                table = batch.block_tables[group][where]
                columns = torch.arange(table.shape[1], device=is_full.device)
                is_full[torch.where(columns < end[:, None], table, 0)] = True

    def _share_rows(self, missing: IntArray) -> IntArray:
        """How many of its missing rows each request gets now, of `max_rows` in all.

        So a long prompt delays others by no more than one of the target's steps does.
        """
        before = np.cumsum(missing) - missing
        shared: IntArray = np.clip(self._max_rows - before, 0, missing)
        return shared

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | slice
    ) -> torch.Tensor:
        hidden = self.model.forward(self.model.embed(token_ids), positions)
        return self.model.logits(hidden, rows)


def check_vocabulary(config: EngineConfig, target: ModelSource, draft: ModelSource) -> None:
    """Raise ConfigError unless both models mean the same by a token id."""
    remedy = "choose a draft model of the same family"
    sizes = [int(source.config["vocab_size"]) for source in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model {draft.name} has a vocabulary of {sizes[1]} tokens, {target.name} "
            f"one of {sizes[0]}: {remedy}"
        )
    if config.model.skip_tokenizer_init or draft.path == target.path:
        return
    own, other = load_tokenizer(target, config.model.tokenizer), load_tokenizer(draft)
    size = min(own.vocab_size, other.vocab_size)
    for token_id in range(0, size, max(size // NUM_COMPARED, 1)):
        if own.token_bytes(token_id) != other.token_bytes(token_id):
            raise ConfigError(
                f"the draft model {draft.name} has another tokenizer than {target.name}: token "
                f"{token_id} is {other.token_bytes(token_id)!r}, not {own.token_bytes(token_id)!r}:"
                f" {remedy}"
            )
