"""MediaFrontend: turns the media of a prompt into what the engine takes."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec

from penstock.config.media import MediaConfig, check_io_kwargs
from penstock.confined.errors import PoolFull, TooMuchMemory, TooMuchTime
from penstock.confined.pool import ConfinedPool, Limits
from penstock.confined.scope import current_tenant, need_turn, run_confined, waiting
from penstock.loading.source import ModelSource
from penstock.media.content import MediaContent
from penstock.media.fetch import MediaFetcher
from penstock.media.files import MediaFile, MediaFolder, write_file
from penstock.media.messages import (
    DescribeProcessor,
    MediaSetup,
    ProcessedMedia,
    ProcessMedia,
    ProcessorInfo,
)
from penstock.protocol.errors import InputError
from penstock.protocol.media import EMBEDS, MediaItem, MediaTensor, Modality

ENTRY = "penstock.media.worker:make_worker"
MAX_PIXELS = 64 * 2**20  # of a decoded image
LIMITS = Limits(
    cpu_s=30.0,
    memory_bytes=3 * 2**30,
    num_workers=2,
    max_queued=256,
    quantum_s=1.0,
    low_priority_s=5.0,  # most videos take less, and a process takes 3 s to start
    stall_s=30.0,
)
GIB = 2**30
MAX_UUIDS = 100_000


@dataclass(frozen=True, eq=False)
class Processed:
    """A processed item and its file, which lives as long as this."""

    modality: Modality
    hash: bytes
    file: MediaFile
    answer: ProcessedMedia
    num_bytes: int  # of the file


class MediaFrontend:
    """Thread-safe. The processes start with the first item."""

    def __init__(
        self,
        config: MediaConfig,
        source: ModelSource,
        make_setup: Callable[[], MediaSetup],
        width: int,
        limits: Limits = LIMITS,
    ) -> None:
        self.config = config
        self.width = width  # of an embedding
        self.fetcher = MediaFetcher(config)
        # Kept for later processes: a tokenizer from GGUF takes seconds.
        encoded = functools.cache(lambda: msgspec.json.encode(make_setup()))
        self.pool = ConfinedPool(ENTRY, encoded, limits)
        self.on_lookup: Callable[[bool], None] = lambda is_hit: None  # called in any thread
        self._kind = source.fingerprint
        self._folder = MediaFolder()
        self._lock = threading.Lock()
        self._info: ProcessorInfo | None = None
        self._cache: OrderedDict[bytes, Processed] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._running: dict[tuple[str, bytes], Future[Processed | None]] = {}  # by tenant, digest
        # What tenants sent with a uuid: tenant, uuid and options. Least recently used first.
        self._digests: OrderedDict[tuple[str, str | None, str], bytes] = OrderedDict()

    def info(self) -> ProcessorInfo:
        """What the processor's tokens are. The first thing that work on media asks."""
        need_turn()
        if self._info is None:
            _check_packages("transformers", "PIL")
            answer = run_confined(self.pool, msgspec.msgpack.encode(DescribeProcessor()))
            self._info = msgspec.msgpack.decode(answer, type=ProcessorInfo)
        return self._info

    def token_of(self, modality: Modality, where: str) -> str:
        """The placeholder of an item in a prompt."""
        info = self.info()
        if modality == "image":
            return info.image_token
        if info.video_token is None:
            raise InputError(f"{where} is a video, but this model takes images only", where)
        return info.video_token

    def check_counts(self, contents: Sequence[MediaContent]) -> None:
        for modality, count in Counter(content.modality for content in contents).items():
            most = self.config.limit_of(modality)
            if most is not None and count > most:
                last = [each.where for each in contents if each.modality == modality][most]
                raise InputError(
                    f"a prompt may have at most {most} items of type {modality} "
                    f"(limit_mm_per_prompt), got {count}",
                    last,
                )

    def process(self, content: MediaContent) -> Processed:
        """Read, decode and process an item, unless that was done before."""
        self.token_of(content.modality, content.where)
        content = self._with_defaults(content)
        name = (current_tenant(), content.uuid, content.options())
        if content.url is not None:
            data = self.fetcher.read(content.url, content.where)
            content = replace(content, data=data, url=None)
        if content.data is None:
            return self._sent_before(name, content.where)
        if content.modality == "video" and content.shape is None:
            _check_packages("av")
        item = self._processed(content)
        if content.uuid is not None:
            with self._lock:
                self._digests[name] = item.hash
                self._digests.move_to_end(name)
                while len(self._digests) > MAX_UUIDS:
                    self._digests.popitem(last=False)
        return item

    def _processed(self, content: MediaContent) -> Processed:
        """The item from the cache. Else it is processed, once for requests of a tenant that ask
        for it at the same time."""
        digest = content.digest(self._kind)
        key = (current_tenant(), digest)
        while True:
            with self._lock:
                item = self._cache.get(digest)
                running = self._running.get(key)
                if item is not None:
                    self._cache.move_to_end(digest)
                elif running is None:
                    done = self._running[key] = Future[Processed | None]()
                    break
            if item is None and running is not None:
                item = _wait_for(running)
            if item is not None:
                self.on_lookup(True)
                return item
        self.on_lookup(False)
        try:
            item = self._run(content, digest)
            self._keep(item)
            return item
        finally:
            with self._lock:
                del self._running[key]
            done.set_result(item)

    def _with_defaults(self, content: MediaContent) -> MediaContent:
        """The content with the options of the engine, as far as it has none of its own."""
        io_kwargs = {
            **(self.config.media_io_kwargs or {}).get(content.modality, {}),
            **content.io_kwargs,
        }
        check_io_kwargs(content.modality, io_kwargs)
        kwargs = {**(self.config.mm_processor_kwargs or {}), **content.kwargs}
        return replace(content, kwargs=kwargs, io_kwargs=io_kwargs)

    def _sent_before(self, name: tuple[str, str | None, str], where: str) -> Processed:
        """The item that the same tenant sent with this uuid, processed in the same way."""
        with self._lock:
            digest = self._digests.get(name)
            item = None if digest is None else self._cache.get(digest)
            if item is not None:
                self._cache.move_to_end(item.hash)
        self.on_lookup(item is not None)
        if item is not None:
            return item
        raise InputError(
            f"{where}: nothing is kept for uuid {name[1]!r:.80}: send the media with it", where
        )

    def _run(self, content: MediaContent, digest: bytes) -> Processed:
        assert content.data is not None
        file = self._folder.new()
        if content.is_embeds:
            answer = self._take_embeds(content, file)
            return Processed(content.modality, digest, file, answer, file.size)
        request = ProcessMedia(
            modality=content.modality,
            data=content.data,
            places=[str(place) for place in file.places],
            shape=content.shape,
            kwargs=dict(content.kwargs),
            io_kwargs=dict(content.io_kwargs),
            facts=dict(content.facts),
            max_pixels=MAX_PIXELS,
        )
        answer = self._ask(request, content)
        self._check_rows(sum(answer.runs), content.where)
        _settle(file, answer.path)
        return Processed(content.modality, digest, file, answer, file.size)

    def _ask(self, request: ProcessMedia, content: MediaContent) -> ProcessedMedia:
        try:
            encoded = run_confined(self.pool, msgspec.msgpack.encode(request))
        except (TooMuchMemory, TooMuchTime) as error:
            raise InputError(
                f"{content.where} takes too much to process: {error}; send a smaller one",
                content.where,
            ) from error
        answer = msgspec.msgpack.decode(encoded, type=ProcessedMedia)
        if answer.error is not None:
            raise InputError(f"{content.where}: {answer.error}", content.where)
        return answer

    def _check_rows(self, num_rows: int, where: str) -> None:
        if num_rows > (most := self.config.encoder_cache_tokens):
            raise InputError(
                f"{where} has {num_rows} embeddings, but at most {most} fit "
                "(encoder_cache_tokens): send a smaller one",
                where,
            )

    def _take_embeds(self, content: MediaContent, file: MediaFile) -> ProcessedMedia:
        """Embeddings are taken as they are: rows for as many placeholders."""
        where = content.where
        if not self.config.enable_mm_embeds:
            raise InputError(
                f"{where}: embeddings are not accepted here (--enable-mm-embeds)", where
            )
        info, modality = self.info(), content.modality
        is_row = info.image_token_id == info.row_token_id
        if modality == "video":
            is_row = info.video_token_id == info.video_row_token_id
        asks_for_text = modality == "video" and bool(info.merge)
        if not is_row and not asks_for_text:
            raise InputError(f"{where}: this model takes {modality}s, but no embeddings", where)
        assert content.data is not None
        assert content.shape is not None
        num_rows, width = content.shape
        if width != self.width:
            raise InputError(
                f"{where} must be [rows, {self.width}] for this model, got [{num_rows}, {width}]",
                where,
            )
        self._check_rows(num_rows, where)
        self._check_grid(num_rows, content)
        facts = {key: value for key, value in content.facts.items() if key == "grid_thw"}
        answer = ProcessedMedia(text=self.token_of(modality, where), runs=[num_rows], facts=facts)
        if asks_for_text:  # such as times between the frames
            answer = self._ask(
                ProcessMedia(
                    modality=modality,
                    data=b"",
                    places=[str(place) for place in file.places],
                    facts=dict(content.facts),
                    grid=content.facts["grid_thw"],
                    max_pixels=MAX_PIXELS,
                ),
                content,
            )
        _settle(file, write_file([str(place) for place in file.places], content.data))
        tensor = MediaTensor(EMBEDS, "float32", (num_rows, width), 0)
        return msgspec.structs.replace(answer, tensors=[tensor])

    def _check_grid(self, num_rows: int, content: MediaContent) -> None:
        """Positions of these models come from the grid of patches."""
        merge = self.info().merge
        if not merge:
            return
        t, h, w = content.facts.get("grid_thw", (0, 0, 0))
        if h % merge or w % merge or t * (h // merge) * (w // merge) != num_rows:
            raise InputError(
                f"{content.where} needs {content.modality}_grid_thw [time, height, width] in "
                f"patches, of which {merge} x {merge} are a row: {num_rows} rows, got {[t, h, w]}",
                content.where,
            )

    def _keep(self, item: Processed) -> None:
        with self._lock:
            if item.hash in self._cache:
                return
            self._cache[item.hash] = item
            self._cache_bytes += item.num_bytes
            most = self.config.mm_processor_cache_gb * GIB
            while self._cache and (self._cache_bytes > most or self._folder.is_short_of_room()):
                _, dropped = self._cache.popitem(last=False)
                self._cache_bytes -= dropped.num_bytes
                del dropped  # and with it the file, if no request has it

    def expand_text(self, prompt: str, items: Sequence[Processed]) -> tuple[str, list[Processed]]:
        """The prompt with each item's text in its place, and the items in the order of these.

        The items of each modality are in the order of their places.
        """
        info = self.info()
        tokens = [token for token in (info.image_token, info.video_token) if token]
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", prompt)
        kinds: dict[str, Modality] = {info.image_token: "image", info.video_token or "": "video"}
        ordered = self._in_order([kinds[token] for token in pieces[1::2]], items)
        pieces[1::2] = [item.answer.text for item in ordered]
        pieces[-2] += info.after_media
        pieces[-1] += info.prompt_end
        return "".join(pieces), ordered

    def expand_tokens(
        self,
        token_ids: Sequence[int],
        items: Sequence[Processed],
        encode: Callable[[str], list[int]],
    ) -> tuple[list[int], list[Processed]]:
        """As `expand_text`, for a prompt of tokens."""
        info = self.info()
        kinds: dict[int | None, Modality] = {info.video_token_id: "video"}
        kinds[info.image_token_id] = "image"
        ordered = self._in_order([kinds[token] for token in token_ids if token in kinds], items)
        following = iter(ordered)
        expanded: list[int] = []
        for token in token_ids:
            expanded += encode(next(following).answer.text) if token in kinds else [token]
        return expanded, ordered

    def _in_order(self, found: Sequence[Modality], items: Sequence[Processed]) -> list[Processed]:
        needed = [item.modality for item in items]
        for modality in dict.fromkeys([*needed, *found]):
            if found.count(modality) != needed.count(modality):
                token = self.token_of(modality, "prompt")
                raise InputError(
                    f"the prompt must have one {token} for each of its {needed.count(modality)} "
                    f"{modality}s, got {found.count(modality)}",
                    "prompt",
                )
        queues = {each: iter([item for item in items if item.modality == each]) for each in found}
        return [next(queues[modality]) for modality in found]

    def place(
        self, token_ids: list[int], items: Sequence[Processed]
    ) -> tuple[list[int], list[MediaItem]]:
        """Repeat placeholders. `token_ids` have one for each run of them."""
        info = self.info()
        placeholders = {info.row_token_id, info.video_row_token_id}
        runs = [(index, count) for index, item in enumerate(items) for count in item.answer.runs]
        num_found = sum(token in placeholders for token in token_ids)
        if num_found != len(runs):
            raise InputError(
                f"the prompt has {num_found} placeholders of media, but its media need "
                f"{len(runs)}: leave {self.info().image_token} out of the text",
                "prompt",
            )
        expanded: list[int] = []
        places: list[list[tuple[int, int]]] = [[] for _ in items]
        following = iter(runs)
        for token in token_ids:
            if token in placeholders:
                index, count = next(following)
                places[index].append((len(expanded), count))
                expanded += [token] * count
            else:
                expanded.append(token)
        return expanded, list(map(self._item, items, places))

    def _item(self, item: Processed, places: Sequence[tuple[int, int]]) -> MediaItem:
        offset, last = places[0][0], places[-1]
        return MediaItem(
            modality=item.modality,
            hash=item.hash,
            offset=offset,
            length=last[0] + last[1] - offset,
            runs=[(start - offset, count) for start, count in places],
            path=str(item.file.path),
            tensors=item.answer.tensors,
            facts=item.answer.facts,
        )

    def close(self) -> None:
        self.pool.close()
        with self._lock:
            self._cache.clear()
            self._digests.clear()


def _settle(file: MediaFile, path: str | None) -> None:
    if path is None:
        folders = " and ".join(str(place.parent) for place in file.places)
        raise PoolFull(f"{folders} have no room for processed media; try again later")
    file.settle(path)


def _wait_for(running: Future[Processed | None]) -> Processed | None:
    """What another thread processes; None if that fails. The scope of this thread may cancel the
    wait, not the work."""
    end = Future[None]()

    def finish(_: Future[Processed | None]) -> None:
        if end.set_running_or_notify_cancel():
            end.set_result(None)

    with waiting(end):
        running.add_done_callback(finish)
        end.result()
    return running.result()


def _check_packages(*names: str) -> None:
    if any(importlib.util.find_spec(name) is None for name in names):
        raise InputError(
            "images and videos cannot be processed here: the server needs pip install "
            "'penstock[vision]'"
        )
