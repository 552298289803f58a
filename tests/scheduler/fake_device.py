"""A device that computes nothing but remembers everything.

Each slot of its KV memory holds a digest of the tokens up to that position. A row that reads
anything but its own history fails the test, and so does a plan that hands out a block while a
step in flight may still touch it for someone else, or a row whose adapter slot holds another
adapter. The next token is a pure function of seed and history, so a request's whole output can be
told in advance.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kvcache.kv_fakes import is_cross, is_recurrent, positions_read, slot_of

from penstock.protocol.adapter import (
    Adapter,
    DropAdapter,
    FetchAdapter,
    FinishedJob,
    PlaceAdapter,
)
from penstock.protocol.delta import FinishReason
from penstock.protocol.request import EngineRequest
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.step import NO_SLOT, RequestResult, StepPlan, StepResult

VOCABULARY = 12
EOS = 0
STOP_TOKEN = 1
GARBAGE = -1  # what a row that faulted leaves behind


def make_request(request_id, prompt, *, max_tokens=8, seed=0, **kwargs) -> EngineRequest:
    fields = {name: kwargs.pop(name) for name in list(kwargs) if name in REQUEST_FIELDS}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **kwargs),
        seed=seed,
        eos_token_ids=[EOS],
        **fields,
    )


REQUEST_FIELDS = {
    "adapter",
    "priority",
    "arrival_time",
    "cache_salt",
    "read_prefix_cache",
    "output_token_ids",
    "tenant",
}


def make_adapter(name):
    return Adapter(name, f"digest of {name}", f"/adapters/{name}")


def salt_of(request):
    """What besides the tokens decides the history of a request."""
    if request.adapter is None:
        return request.cache_salt
    return f"{request.cache_salt}, {request.adapter.digest}"


def random_requests(rng: random.Random, count: int, longest: int) -> list[EngineRequest]:
    """Requests with prompts of up to `longest` tokens, of different lengths and priorities."""
    return [
        make_request(
            f"r{index}",
            [rng.randrange(12) for _ in range(rng.randrange(1, longest + 1))],
            max_tokens=rng.randrange(1, 20),
            seed=index,
            priority=rng.randrange(3),
        )
        for index in range(count)
    ]


def extend_digest(digest, token_id):
    return hash((digest, token_id))


def digest_of(token_ids, salt=None):
    digest = hash((len(salt), *salt.encode())) if salt else 0
    for token_id in token_ids:
        digest = extend_digest(digest, token_id)
    return digest


def sample(digest, seed, params, num_output):
    token_id = hash((seed, digest, 1)) % VOCABULARY
    stops = [] if params.ignore_eos else [EOS]
    stops += params.stop_token_ids or []
    if num_output < params.min_tokens and token_id in stops:
        return 2 + token_id
    return token_id


def expected_output(request, max_model_len):
    """All tokens of the request and how it ends: (token ids, finish reason, stop reason)."""
    digest = digest_of(request.prompt_token_ids, salt_of(request))
    output = []
    while True:
        token_id = sample(digest, request.seed, request.params, len(output))
        output.append(token_id)
        digest = extend_digest(digest, token_id)
        if token_id == EOS and not request.params.ignore_eos:
            return output, FinishReason.STOP, None
        if token_id in (request.params.stop_token_ids or []):
            return output, FinishReason.STOP, token_id
        if len(output) == request.max_tokens:
            return output, FinishReason.LENGTH, None
        if len(request.prompt_token_ids) + len(output) == max_model_len:
            return output, FinishReason.LENGTH, None


@dataclass
class Row:
    """What the runner's tables hold of a request."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    params: SamplingParams
    seed: int
    salt: str | None
    tables: list[list[int]]
    adapter: str | None = None  # digest
    adapter_slot: int = NO_SLOT
    digests: list[int] = field(default_factory=list)  # of computed positions
    faulted: bool = False
    num_drafts: int = 0  # in the tables

    def __post_init__(self):
        digest = digest_of([], self.salt)
        for token_id in self.token_ids[: self.num_computed]:
            digest = extend_digest(digest, token_id)
            self.digests.append(digest)


@dataclass
class Launched:
    plan: StepPlan
    new_rows: list[Row]
    touched: dict[int, Row]  # block id -> for whom; of those who share one, any
    result: StepResult | None = None


class FakeDevice:
    """`groups` are KVCacheGroups; `salts` and `faults` are what the test says of requests."""

    def __init__(self, groups, max_model_len):
        self.groups = groups
        self.max_model_len = max_model_len
        self.memory = {}  # (block id, offset) -> (group, digest)
        self.salts = {}
        self.adapters = {}  # request id -> digest
        self.fetching = {}  # digest -> why it fails, None if it does not, or ... while undecided
        self.copies = set()  # digests in host memory
        self.slots = {}  # slot -> digest
        self.most_copies = 0  # seen, with those being fetched
        self.faults = {}  # request id -> number of output tokens after which its row fails
        self.launched_rows = {}  # as of the last plan launched
        self.rows = {}  # as of the last plan executed
        self.in_flight = deque()

    # -- launch: tables change at once, computation comes later

    def launch(self, plan):
        for request_id in plan.released_ids:
            self._release(self.launched_rows, request_id)
        fresh = {new.request_id: new for new in plan.new_requests}
        for new in plan.new_requests:
            assert new.request_id not in self.launched_rows
            self.launched_rows[new.request_id] = Row(
                new.request_id,
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                new.params,
                new.seed,
                self.salts.get(new.request_id),
                [[] for _ in self.groups],
                self.adapters.get(new.request_id),
                new.adapter_slot,
            )
        written = {}
        for item in plan.scheduled:
            row = self.launched_rows[item.request_id]
            if not self.in_flight:  # all results were known when this step was planned
                assert item.num_drafts <= row.num_drafts
            new = fresh.get(item.request_id)
            for group, block_ids in enumerate(item.new_block_ids):
                size = self.groups[group].block_size
                is_own = new is None or is_cross(self.groups[group])
                first = 0 if is_own else new.num_computed_tokens // size
                for block_id in block_ids[first:]:
                    self._check_is_nobody_elses(block_id, row)
                    assert written.setdefault(block_id, row) is row, "handed out twice"
        self._append_blocks(plan)
        touched = {}
        for item in plan.scheduled:
            row = self.launched_rows[item.request_id]
            for block_id in self._reachable_blocks(row):
                assert written.get(block_id, row) is row, "written and shared in one step"
                touched[block_id] = row
        new_rows = [self.launched_rows[request_id] for request_id in fresh]
        self.in_flight.append(Launched(plan, new_rows, touched))

    def _release(self, rows, request_id):
        del rows[request_id]

    def _append_blocks(self, plan):
        for item in plan.scheduled:
            tables = self.launched_rows[item.request_id].tables
            for table, block_ids in zip(tables, item.new_block_ids, strict=False):
                table.extend(block_ids)

    def _check_is_nobody_elses(self, block_id, row):
        assert block_id != 0, "the null block was handed out"
        for launched in self.in_flight:
            owner = launched.touched.get(block_id, row)
            assert owner is row, f"block {block_id} is still used by a step in flight"

    def _reachable_blocks(self, row):
        for group, table in zip(self.groups, row.tables, strict=True):
            read = positions_read(group, row.num_computed)
            first = 0 if is_cross(group) else min(read, default=row.num_computed)
            yield from (b for b in table[first // group.block_size :] if b != 0)

    # -- execution, in order, at any time between launch and collect

    def execute_next(self):
        """Run the oldest step that has not run yet, if there is one."""
        for launched in self.in_flight:
            if launched.result is None:
                launched.result = self._execute(launched)
                return

    def collect(self):
        while self.in_flight[0].result is None:
            self.execute_next()
        return self.in_flight.popleft().result

    def reset(self):
        """Forget every request. Steps in flight are computed all the same."""
        while self.in_flight:
            self.collect()
        self.launched_rows.clear()
        self.rows.clear()

    def fail(self):
        """The oldest step fails. Later ones and their jobs never run, and slots hold anything."""
        self.in_flight.clear()
        self.launched_rows.clear()
        self.rows.clear()
        self.slots.clear()

    # -- adapters

    def end_fetch(self, digest, error=None):
        """Let a fetch end. The next step that is executed reports it."""
        self.fetching[digest] = error

    def end_fetches(self):
        """Let all fetches end well that are still undecided."""
        for digest in [digest for digest, end in self.fetching.items() if end is ...]:
            self.end_fetch(digest)

    def _run_job(self, job):
        if isinstance(job, FetchAdapter):
            digest = job.adapter.digest
            if digest in self.copies:  # repeated after a failure
                self.fetching[digest] = None
            self.fetching.setdefault(digest, ...)
            self.most_copies = max(self.most_copies, len(self.copies | self.fetching.keys()))
        elif isinstance(job, DropAdapter):
            self.copies.discard(job.digest)
            self.fetching.pop(job.digest, None)
        else:
            assert isinstance(job, PlaceAdapter)
            assert job.digest in self.copies, "placed without a copy"
            self.slots[job.slot] = job.digest

    def _finished_jobs(self):
        ended = {d: error for d, error in self.fetching.items() if error is not ...}
        for digest, error in ended.items():
            del self.fetching[digest]
            if error is None:
                self.copies.add(digest)
        return [FinishedJob(digest, error) for digest, error in ended.items()]

    def _execute(self, launched):
        plan = launched.plan
        for request_id in plan.released_ids:
            self._release(self.rows, request_id)
        for job in plan.jobs:
            self._run_job(job)
        for row in launched.new_rows:
            self.rows[row.request_id] = row
        results = [
            self._run(self.rows[item.request_id], item, plan.num_drafts) for item in plan.scheduled
        ]
        return StepResult(
            step_id=plan.step_id, results=results, finished_jobs=self._finished_jobs()
        )

    def _run(self, row, item, num_proposed):
        has_adapter = row.adapter is not None
        assert (row.adapter_slot != NO_SLOT) == has_adapter
        assert not has_adapter or self.slots[row.adapter_slot] == row.adapter
        num_output = len(row.token_ids) - row.num_prompt_tokens
        if item.samples and num_output >= self.faults.get(row.request_id, 1 << 30):
            row.faulted = True
            self._write(row, row.num_computed, [GARBAGE] * item.num_tokens)
        if row.faulted:
            return RequestResult(
                request_id=row.request_id, incarnation=item.incarnation, fault="not a number"
            )
        start, num_drafts = row.num_computed, item.num_drafts
        num_known = item.num_tokens - num_drafts
        assert item.num_tokens > 0
        most = min(row.num_prompt_tokens + row.params.max_tokens, self.max_model_len)
        num_after = len(row.token_ids) + (1 + num_drafts if item.samples else 0)
        assert num_after <= most, "samples more tokens than the request may have"
        assert item.samples == (start + num_known == len(row.token_ids))
        self._check_history(row)
        digest = row.digests[-1] if row.digests else digest_of([], row.salt)
        computed = []
        for token_id in row.token_ids[start : start + num_known]:
            digest = extend_digest(digest, token_id)
            computed.append(digest)
        if not item.samples:
            self._write(row, start, computed)
            row.digests += computed
            row.num_computed += item.num_tokens
            return RequestResult(request_id=row.request_id, incarnation=item.incarnation)
        sampled = [sample(digest, row.seed, row.params, num_output)]
        accepting = True
        for index in range(num_drafts):
            is_right = accepting and hash((digest, row.seed, index)) % 3 != 0
            draft = sampled[-1] if is_right else (sampled[-1] + 1) % VOCABULARY
            digest = extend_digest(digest, draft)
            computed.append(digest)
            accepting = is_right
            if accepting:
                sampled.append(sample(digest, row.seed, row.params, num_output + len(sampled)))
        num_right = num_known + len(sampled) - 1
        self._write(row, start, computed, num_right)
        row.digests += computed[:num_right]
        row.num_computed += num_right
        row.token_ids += sampled
        reported = None  # how many drafts it has for the next step, if the drafter says so
        if num_proposed and row.seed % 2:
            reported = hash((digest, row.seed)) % (num_proposed + 1)
        row.num_drafts = num_proposed if reported is None else reported
        return RequestResult(
            request_id=row.request_id,
            incarnation=item.incarnation,
            token_ids=sampled,
            num_drafts=reported,
        )

    def _check_history(self, row):
        for group_index, group in enumerate(self.groups):
            if is_cross(group):
                self._check_other_sequence(row, row.tables[group_index])
            for position in positions_read(group, row.num_computed):
                slot = slot_of(group, row.tables[group_index], position)
                assert slot[0] != 0, "a token that is needed lies in a gap"
                assert self.memory[slot] == (group_index, row.digests[position]), (
                    f"{row.request_id} reads another's history at {position}"
                )

    def _check_other_sequence(self, row, table):
        """It is written when a request's first token is computed, and read from then on."""
        for block_id in table:
            if row.num_computed == 0:
                self.memory[block_id, 0] = row.request_id
            assert self.memory[block_id, 0] == row.request_id

    def _write(self, row, start, digests, num_right=None):
        """A state is written only where drafts hold: it could not be taken back."""
        for group_index, group in enumerate(self.groups):
            if is_cross(group):
                continue
            kept = digests[:num_right] if is_recurrent(group) else digests
            for position, digest in enumerate(kept, start):
                slot = slot_of(group, row.tables[group_index], position)
                assert slot[0] != 0
                self.memory[slot] = (group_index, digest)
