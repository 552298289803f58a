"""MediaFrontend: turns the media of a prompt into what the engine takes."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.config.media import MediaConfig
from penstock.confined.errors import TooMuchMemory, TooMuchTime
from penstock.confined.pool import ConfinedPool, Limits
from penstock.confined.scope import run_confined
from penstock.loading.source import ModelSource
from penstock.media.content import MediaContent
from penstock.media.files import MediaFile, MediaFolder
from penstock.media.messages import (
    DescribeProcessor,
    MediaRequest,
    MediaSetup,
    ProcessedMedia,
    ProcessMedia,
    ProcessorInfo,
)
from penstock.protocol.errors import InputError
from penstock.protocol.media import MediaItem

ENTRY = "penstock.media.worker:make_worker"
MAX_PIXELS = 64 * 2**20  # of a decoded image
LIMITS = Limits(
    cpu_s=30.0, memory_bytes=3 * 2**30, num_workers=2, max_queued=256, quantum_s=1.0, stall_s=30.0
)
GIB = 2**30


@dataclass(frozen=True, eq=False)
class Processed:
    """A processed item and its file, which lives as long as this."""

    hash: bytes
    file: MediaFile
    answer: ProcessedMedia

    @property
    def num_rows(self) -> int:
        return sum(self.answer.runs)


class MediaFrontend:
    """Thread-safe. The processes start with the first item."""

    def __init__(self, config: MediaConfig, source: ModelSource, limits: Limits = LIMITS) -> None:
        self.config = config
        self.pool = ConfinedPool(
            ENTRY, lambda: msgspec.json.encode(MediaSetup(str(source.path))), limits
        )
        self._kind = json.dumps([source.fingerprint, config.media_io_kwargs], sort_keys=True)
        self._folder = MediaFolder()
        self._lock = threading.Lock()
        self._info: ProcessorInfo | None = None
        self._cache: OrderedDict[bytes, Processed] = OrderedDict()  # least recently used first
        self._cache_bytes = 0

    def info(self) -> ProcessorInfo:
        """What the processor's tokens are."""
        if self._info is None:
            for package in ("transformers", "PIL"):
                if importlib.util.find_spec(package) is None:
                    raise InputError(
                        "images cannot be processed here: the server needs pip install "
                        "'penstock[vision]'"
                    )
            answer = run_confined(self.pool, msgspec.msgpack.encode(DescribeProcessor()))
            self._info = msgspec.msgpack.decode(answer, type=ProcessorInfo)
        return self._info

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
        """Decode and process an item, unless that was done before."""
        self.info()
        kwargs = {**(self.config.mm_processor_kwargs or {}), **content.kwargs}
        content = replace(content, kwargs=kwargs)
        digest = content.digest(self._kind)
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        file = self._folder.new()
        request: MediaRequest = ProcessMedia(
            modality=content.modality,
            data=content.data,
            path=str(file.path),
            size=content.size,
            kwargs=kwargs,
            io_kwargs=(self.config.media_io_kwargs or {}).get(content.modality, {}),
            max_pixels=MAX_PIXELS,
        )
        try:
            answer = run_confined(self.pool, msgspec.msgpack.encode(request))
        except (TooMuchMemory, TooMuchTime) as error:
            raise InputError(
                f"{content.where} takes too much to process: {error}; send a smaller one",
                content.where,
            ) from error
        found = msgspec.msgpack.decode(answer, type=ProcessedMedia)
        if found.error is not None:
            raise InputError(f"{content.where}: {found.error}", content.where)
        item = Processed(digest, file, found)
        most = self.config.encoder_cache_tokens
        if item.num_rows > most:
            raise InputError(
                f"{content.where} has {item.num_rows} embeddings, but at most {most} fit "
                "(encoder_cache_tokens): send a smaller one",
                content.where,
            )
        self._keep(item)
        return item

    def _keep(self, item: Processed) -> None:
        with self._lock:
            if item.hash in self._cache:
                return
            self._cache[item.hash] = item
            self._cache_bytes += item.file.size
            while self._cache and self._cache_bytes > self.config.mm_processor_cache_gb * GIB:
                _, dropped = self._cache.popitem(last=False)
                self._cache_bytes -= dropped.file.size

    def expand_text(self, prompt: str, items: Sequence[Processed]) -> str:
        """The prompt with each item's text in the place of its placeholder."""
        token = self.info().image_token
        pieces = prompt.split(token)
        self._check_places(len(pieces) - 1, len(items))
        texts = [item.answer.text for item in items]
        return "".join(text for pair in zip(pieces, [*texts, ""], strict=True) for text in pair)

    def expand_tokens(
        self,
        token_ids: Sequence[int],
        items: Sequence[Processed],
        encode: Callable[[str], list[int]],
    ) -> list[int]:
        """As `expand_text`, for a prompt of tokens."""
        place = self.info().image_token_id
        self._check_places(token_ids.count(place), len(items))
        texts = iter(items)
        expanded: list[int] = []
        for token in token_ids:
            expanded += encode(next(texts).answer.text) if token == place else [token]
        return expanded

    def _check_places(self, found: int, needed: int) -> None:
        if found != needed:
            token = self.info().image_token
            raise InputError(
                f"the prompt must have one {token} for each of its {needed} images, got {found}",
                "prompt",
            )

    def place(
        self, token_ids: list[int], items: Sequence[Processed]
    ) -> tuple[list[int], list[MediaItem]]:
        """Repeat placeholders. `token_ids` have one for each run of them."""
        placeholder = self.info().row_token_id
        runs = [(index, count) for index, item in enumerate(items) for count in item.answer.runs]
        num_found = token_ids.count(placeholder)
        if num_found != len(runs):
            raise InputError(
                f"the prompt has {num_found} placeholders of images, but its images need "
                f"{len(runs)}: leave {self.info().image_token} out of the text",
                "prompt",
            )
        expanded: list[int] = []
        places: list[list[tuple[int, int]]] = [[] for _ in items]
        following = iter(runs)
        for token in token_ids:
            if token == placeholder:
                index, count = next(following)
                places[index].append((len(expanded), count))
                expanded += [token] * count
            else:
                expanded.append(token)
        return expanded, list(map(self._item, items, places))

    def _item(self, item: Processed, places: Sequence[tuple[int, int]]) -> MediaItem:
        offset, last = places[0][0], places[-1]
        return MediaItem(
            modality="image",
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
