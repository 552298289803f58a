"""Method draft_model: a smaller model with the target's vocabulary drafts.

It reads tokens from the request tables when it proposes: first those that its cache lacks, then its
own drafts. It takes no part in the target's steps. So a step after which nothing is proposed costs
nothing, and its tokens are caught up with later. With recurrent layers, rows of drafts never count
(`DraftStates`).

On a GPU the loop leaves no row missing but that of the next token. So from then on the host need
not know which drafts held, and it waits for the device only to catch up: when a request begins, and
after steps without drafts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.loading.speculators import head_method
from penstock.loading.tasks import choose_task
from penstock.models.assembly import load_model
from penstock.models.base import Hidden
from penstock.models.runtime import longest_context
from penstock.platforms.platform import GIB, is_out_of_memory
from penstock.protocol.errors import ConfigError
from penstock.protocol.kv import RecurrentSpec
from penstock.protocol.step import NewRequest, StepPlan
from penstock.runner.drafter import Drafts, DraftSetup, DraftStep
from penstock.runner.drafters.model import DraftBatch, ModelDrafter
from penstock.runner.drafters.states import DraftStates
from penstock.runner.kv_memory import KVMemory
from penstock.runner.sampler import Sampler
from penstock.runner.sampling_tables import to_device
from penstock.runner.tables import IntArray, RequestTables
from penstock.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from penstock.runner.drafters.loop import DraftLoop

NUM_COMPARED = 4096  # tokens: those of another tokenizer differ nearly everywhere
NO_TOKEN = -1

logger = logging.getLogger(__name__)


class _Known(NamedTuple):
    """Of each request, on the host."""

    num_valid: IntArray  # leading tokens that have rows
    num_tokens: IntArray
    room: IntArray  # see `DraftBatch`

    def missing(self, wanted: IntArray) -> IntArray:
        """Rows up to `wanted` leading tokens. Requests that have no place for them get none."""
        missing: IntArray = np.where(self.room < wanted, 0, wanted - self.num_valid)
        return missing


class _InLoop(NamedTuple):
    """Of each request, on the device."""

    own: torch.Tensor  # its row of this drafter's tables
    at: torch.Tensor  # its slot; any for padding
    num_tokens: torch.Tensor
    num_valid: torch.Tensor
    is_ready: torch.Tensor  # lacks nothing before the last token, for whose row there is a place
    room: torch.Tensor


class DraftModelDrafter(ModelDrafter):
    keeps_last = True

    def __init__(self, name: str, num_drafts: int, quantization: str | None = None) -> None:
        super().__init__(num_drafts)
        self.num_lookahead = num_drafts + 1  # the last draft gets a row, too
        self._name = name
        self._quantization = quantization

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = (
            setup.config_of(self._name, self._quantization),
            setup.limits.max_model_len,
        )
        draft = resolve_source(own.model, own.load)
        method = head_method(draft.config)
        if method is not None:
            raise ConfigError(f"{self._name} is a draft head: use method {method}")
        if choose_task(own, draft) != "generate":
            raise ConfigError(f"the draft model {self._name} does not generate text")
        check_vocabulary(setup.config, setup.source, draft)
        model, dtypes, _ = load_model(own, draft, setup.platform, setup.draft_mesh, max_model_len)
        specs = model.kv_specs(dtypes.kv).items()
        recurrent = {name: spec for name, spec in specs if isinstance(spec, RecurrentSpec)}
        num_positions = longest_context(draft.config)
        if len(recurrent) == len(specs):  # it knows no positions
            num_positions = max_model_len
        if num_positions < max_model_len:
            logger.warning(
                "The draft model's context is %d tokens: drafts end there, requests may have %d",
                num_positions, max_model_len,
            )  # fmt: skip
        self.use(model, dtypes.kv, setup.max_rows, min(num_positions, max_model_len))
        if recurrent:
            self.keeps_last = False
            self.states = self._make_states(recurrent, setup)

    def _make_states(self, specs: dict[str, RecurrentSpec], setup: DraftSetup) -> DraftStates:
        """They are allocated before the KV cache, which gets the rest of a GPU's memory."""
        count, device = setup.limits.max_num_seqs, setup.platform.device
        try:
            states = DraftStates(specs, count, self.max_positions, device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"there is not enough memory for the states of the draft model {self._name}, two "
                f"for each of {count} requests: lower max_num_seqs"
            ) from error
        logger.info(
            "The states of the draft model take %.2f GiB, two for each of max_num_seqs=%d requests",
            states.nbytes / GIB, count,
        )  # fmt: skip
        return states

    def start(self, tables: RequestTables, memory: KVMemory, sampler: Sampler) -> None:
        super().start(tables, memory, sampler)
        # By slot: how many leading tokens have rows in the cache, and the drafts behind them that
        # have rows, too. Those rows count where the drafts turned out to be the request's tokens.
        # The last row takes what nobody reads.
        slots, device = len(tables.num_tokens), tables.device
        assert self.states is None or slots <= self.states.num_slots
        self._num_done = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._drafted = torch.full((slots + 1, self.num_drafts), NO_TOKEN, device=device)
        # By KV group: blocks all of whose rows the draft layers have. A cached block may lack some,
        # if its request ended before the drafter had caught up.
        num_blocks = memory.layout.num_blocks
        self._is_full = {
            group: torch.zeros(num_blocks, dtype=torch.bool, device=device)
            for group in set(self.groups.values())
        }
        self._unchecked: set[int] = set()  # slots whose cached blocks were not looked at yet
        # Slots whose requests surely lack no row but that of the next token.
        self._is_complete = np.zeros(slots, dtype=np.bool_)

    def add(self, slot: int, request: NewRequest) -> None:
        cached = request.num_computed_tokens if self.states is None else 0
        self._num_done[slot] = cached  # cached blocks have draft rows, too
        self._drafted[slot] = NO_TOKEN
        self._is_complete[slot] = False
        if cached:
            self._unchecked.add(slot)

    def remove(self, slot: int) -> None:
        self._unchecked.discard(slot)

    def take_blocks(self, plan: StepPlan) -> None:
        if not plan.num_drafts:
            self._is_complete[:] = False
        cached = {request.request_id: request.num_computed_tokens for request in plan.new_requests}
        for group, is_full in self._is_full.items():
            new: list[int] = []
            for item in plan.scheduled:
                if item.new_block_ids:
                    num_cached = cached.get(item.request_id, 0) // self._block_size(group)
                    new += item.new_block_ids[group][num_cached:]
            if new:
                is_full.index_fill_(0, to_device(np.array(new), is_full.device), False)

    def propose(self, step: DraftStep) -> Drafts:
        if self._loop is not None and self._sampler.draft_kind(step.host_slots) is not None:
            drafts = self._propose_in_loop(self._loop, step)
            if drafts is not None:
                return Drafts(drafts)
        self._is_complete[step.host_slots] = False
        everyone, num_drafts = self._batch(step), step.num_drafts
        known = self._known(everyone)
        counts = self._share_rows(known.missing(known.num_tokens))
        drafts = torch.zeros_like(everyone.slots)[:, None].repeat(1, num_drafts)
        device, room, num_tokens = drafts.device, known.room, known.num_tokens
        reached = known.num_valid + counts
        has_drafts = reached == num_tokens
        order, logits = self._catch_up(everyone, known, counts)
        if logits is not None and has_drafts.any():
            drafts[to_device(order, device)] = self._draft(everyone.take(order), logits, num_drafts)
        if self.states is None:
            # The last draft has no row yet, and others may have no place for theirs.
            num_rows = np.where(has_drafts, np.clip(room - num_tokens, 0, num_drafts - 1), 0)
            has_row = torch.arange(num_drafts, device=device) < to_device(num_rows, device)[:, None]
            self._drafted[everyone.slots, :num_drafts] = drafts.masked_fill(~has_row, NO_TOKEN)
        if device.type != "cpu":
            return Drafts(drafts)  # the host plans ahead, and uses no counts
        num_good = np.where(has_drafts, np.clip(room - num_tokens + 1, 0, num_drafts), 0)
        return Drafts(drafts, None if (num_good == num_drafts).all() else num_good)

    def _propose_in_loop(self, loop: DraftLoop, step: DraftStep) -> torch.Tensor | None:
        """Catch up with what is missing before the last token, and let the loop do the rest."""
        slots, room = step.host_slots, self._room(step.host_slots)
        if not self._is_complete[slots].all():
            everyone = self._batch(step)
            known = self._known(everyone)
            counts = self._share_rows(known.missing(known.num_tokens - 1))
            self._catch_up(everyone, known, counts)
            self._is_complete[slots] = known.num_valid + counts == known.num_tokens - 1
        if self.states is not None:  # drafts that hold are missing next time
            self._is_complete[slots] = False
        # The loop's rows need a place: those of the last token and of all drafts.
        bound = self._tables.computed_bound[slots] + 1 + step.num_drafts
        self._is_complete[slots] &= bound <= room
        return loop.propose(slots, step.last_rows, room, step.num_drafts)

    def _known(self, batch: DraftBatch) -> _Known:
        if self._unchecked:
            self._check_cached(batch)
        known = torch.stack([self._num_valid(batch), batch.num_tokens, batch.room])
        return _Known(*known.cpu().numpy())  # a GPU waits here

    def _catch_up(
        self, batch: DraftBatch, known: _Known, counts: IntArray
    ) -> tuple[IntArray, torch.Tensor | None]:
        """Compute the next `counts` rows of each request.

        Returns the order in which requests were computed, those without rows left out, and the
        logits of each one's last row.
        """
        device, logits = batch.slots.device, None
        order = np.argsort(counts > 1, kind="stable")  # requests with one row go first
        order = order[counts[order] > 0]
        if self.states is not None:
            self.states.use_known()
        if len(order):
            first = to_device(known.num_valid[order], device)
            logits = self._forward(batch.take(order), first, counts[order])
        reached = known.num_valid + counts
        self._num_done[batch.slots] = to_device(reached, device)
        self._drafted.index_fill_(0, batch.slots, NO_TOKEN)
        self._mark_full(batch, known.num_valid, reached)
        return order, logits

    def begin(
        self, slots: torch.Tensor, last_rows: torch.Tensor, room: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """On the device, for the loop: note who lacks nothing before the last token."""
        tables = self._tables
        nobody = len(self._num_done) - 1
        own = torch.where(slots < 0, nobody, slots)
        at = slots.clamp(min=0)
        num_tokens = tables.num_tokens[at].long()
        num_valid = self._valid_rows(own, at, num_tokens)
        is_ready = (num_valid == num_tokens - 1) & (num_tokens <= room)
        self._in_loop = _InLoop(own, at, num_tokens, num_valid, is_ready, room)
        return torch.where(is_ready, slots, -1)

    def end(self, drafts: torch.Tensor) -> None:
        """On the device, for the loop: all rows of those requests are there now."""
        now, columns = self._in_loop, torch.arange(drafts.shape[1], device=drafts.device)
        reached = torch.where(now.is_ready, now.num_tokens, now.num_valid)
        positions = now.num_tokens[:, None] + columns
        has_row = now.is_ready[:, None] & (positions < now.room[:, None])
        if self.states is not None:
            has_row = torch.zeros_like(has_row)
        first = self._num_done[now.own]
        # Single values would come from the host's memory, which a graph cannot capture.
        self._num_done[now.own] = reached
        self._drafted.index_fill_(0, now.own, NO_TOKEN)
        self._drafted[now.own, : drafts.shape[1]] = torch.where(has_row, drafts, NO_TOKEN)
        for group, is_full in self._is_full.items():
            size, table = self._block_size(group), self._tables.block_tables[group]
            # The blocks in which accepted drafts and the last token are.
            blocks = torch.arange((self.num_drafts + 1) // size + 2, device=drafts.device)
            blocks = (first // size)[:, None] + blocks
            found = table[now.at[:, None], blocks.clamp(max=table.shape[1] - 1)]
            is_done = now.is_ready[:, None] & (blocks < (reached // size)[:, None])
            is_full.index_fill_(0, torch.where(is_done, found, 0).flatten().long(), True)

    def _num_valid(self, batch: DraftBatch) -> torch.Tensor:
        """How many leading tokens of each request have rows. The last token is never among them."""
        return self._valid_rows(batch.slots, batch.slots, batch.num_tokens)

    def _valid_rows(
        self, own: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """`own`: rows of this drafter's tables, `slots`: of the request tables."""
        num_done, drafted = self._num_done[own], self._drafted[own]
        positions = num_done[:, None] + torch.arange(self.num_drafts, device=num_done.device)
        positions = positions.clamp(max=self._tables.token_ids.shape[1] - 1)
        held = drafted == self._tables.token_ids[slots[:, None], positions]
        num_valid = num_done + held.int().cumprod(dim=1).sum(dim=1)
        return torch.minimum(num_valid, num_tokens - 1)

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
                done = torch.where(columns < end[:, None], table, 0)
                is_full.index_fill_(0, done.flatten().long(), True)

    def _share_rows(self, missing: IntArray) -> IntArray:
        """How many of its missing rows each request gets now, of `max_rows` in all.

        So a long prompt delays others by no more than one of the target's steps does.
        """
        before = np.cumsum(missing) - missing
        shared: IntArray = np.clip(self._max_rows - before, 0, missing)
        return shared

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Hidden:
        return self.model.forward(self.model.embed(token_ids), positions)

    def logits(self, hidden: Hidden, rows: torch.Tensor | slice) -> torch.Tensor:
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
