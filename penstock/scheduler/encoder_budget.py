"""EncoderBudget: decides which media are encoded in a step, and whose embeddings are kept.

Workers keep the embeddings of media, at most `num_rows` rows. A request holds an item from the step
that computes its first token to the step that computes its last. Items that nobody holds stay until
their room is needed, the least recently used first. Workers drop an item in the order of the steps:
a step that was launched before has read it.

A request holds at most one item beyond a step, and can finish it without another. So requests
cannot wait for each other's items forever, as long as each item fits.
"""

from __future__ import annotations

from collections import Counter

from penstock.protocol.errors import InputError
from penstock.protocol.limits import StepLimits
from penstock.protocol.media import DropMedia, EncodeMedia, MediaItem, MediaJob
from penstock.protocol.request import EngineRequest
from penstock.scheduler.limits import before_span
from penstock.scheduler.request import RequestState


class EncoderBudget:
    def __init__(self, limits: StepLimits) -> None:
        self.num_encoded = 0  # items since the start
        self._limits = limits
        self._sizes: dict[bytes, int] = {}  # rows of each item kept, least recently used first
        self._holds = Counter[bytes]()  # requests that hold an item
        self._held: dict[str, bytes] = {}  # what each request holds
        self._in_step: set[bytes] = set()  # items that the step being planned reads
        self._num_locked = 0  # rows of items that are held or in the step
        self._num_kept = 0  # rows
        self._num_in_step = 0  # rows that the step being planned encodes
        self._jobs: list[MediaJob] = []

    def check(self, request: EngineRequest) -> None:
        """Raise InputError if a request's media can never be encoded."""
        most = self._limits.encoder_rows
        rows = [item.num_rows for item in request.media]
        if not self._limits.enable_chunked_prefill:
            rows = [sum(rows)]
        if max(rows, default=0) > most:
            raise InputError(
                f"an item of multi_modal_data has {max(rows)} embeddings, but at most {most} fit: "
                "send smaller or fewer items, or raise encoder_cache_tokens",
                "multi_modal_data",
            )

    def begin_step(self) -> None:
        self._num_in_step = 0
        for digest in self._in_step:
            if not self._holds[digest]:
                self._num_locked -= self._sizes[digest]
        self._in_step.clear()

    def limit(self, state: RequestState, first: int, num_tokens: int) -> int:
        """How many of a request's tokens from `first` on the step may compute: those before the
        first item for which there is no room now."""
        if not state.awaits_media:
            return num_tokens
        num_free = self._limits.encoder_rows - self._num_locked
        num_encoded, end = self._num_in_step, first + num_tokens
        seen: set[bytes] = set()
        for item in state.media:
            if item.end <= first or self._is_locked(item.hash) or item.hash in seen:
                continue
            if item.offset >= end:
                break
            size = item.num_rows
            num_new = 0 if item.hash in self._sizes else size
            # The first item of a step may be larger than a step.
            is_late = (
                num_new
                and num_encoded
                and num_encoded + num_new > self._limits.max_num_batched_tokens
            )
            if is_late or size > num_free:
                end = max(item.offset, first)
                break
            num_free -= size
            num_encoded += num_new
            seen.add(item.hash)
        end = max(before_span(state.spans, end), first)
        if not self._limits.enable_chunked_prefill and end < first + num_tokens:
            return 0
        return end - first

    def take(self, state: RequestState, num_tokens: int) -> None:
        """The step computes these tokens, which `limit` allowed. Their items are there for it."""
        if not state.awaits_media:
            return
        first = state.num_computed_tokens
        end = first + num_tokens
        for item in state.media:
            if item.end <= first:
                continue
            if item.offset >= end:
                break
            self._lock(item, state.tower_slot)
            if item.end > end:
                if state.request_id not in self._held:
                    self._held[state.request_id] = item.hash
                    self._holds[item.hash] += 1
            elif self._held.get(state.request_id) == item.hash:
                self.release(state)

    def release(self, state: RequestState) -> None:
        """A request ends or is preempted."""
        digest = self._held.pop(state.request_id, None)
        if digest is None:
            return
        self._holds[digest] -= 1
        if not self._holds[digest]:
            del self._holds[digest]
            if digest not in self._in_step:
                self._num_locked -= self._sizes[digest]

    def take_jobs(self) -> list[MediaJob]:
        """Return what workers must do before the next step, in order."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def reset(self) -> None:
        """Workers forgot all embeddings, and no request runs."""
        assert not self._held, "requests were preempted before"
        self._sizes.clear()
        self._in_step.clear()
        self._jobs.clear()
        self._num_locked = self._num_kept = 0

    def _is_locked(self, digest: bytes) -> bool:
        return digest in self._in_step or self._holds[digest] > 0

    def _lock(self, item: MediaItem, adapter_slot: int | None) -> None:
        if not self._is_locked(item.hash):
            size = self._sizes.pop(item.hash, None)
            if size is None:
                size = item.num_rows
                self._make_room(size)
                self._num_kept += size
                self._num_in_step += size
                self.num_encoded += 1
                self._jobs.append(EncodeMedia(item, adapter_slot))
            self._sizes[item.hash] = size  # now the most recently used
            self._num_locked += size
        self._in_step.add(item.hash)

    def _make_room(self, size: int) -> None:
        victims = (digest for digest in list(self._sizes) if not self._is_locked(digest))
        while self._num_kept + size > self._limits.encoder_rows:
            digest = next(victims)
            self._num_kept -= self._sizes.pop(digest)
            self._jobs.append(DropMedia(digest))
