"""MediaFrontend: names of items, embeddings, and what is kept."""

from __future__ import annotations

import base64
import errno
import io
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vision import VARIANTS, InProcessMedia, clip, make_vision_checkpoint, picture
from waiting import eventually

from penstock import LLM, SamplingParams
from penstock.confined.errors import PoolFull, WorkerLost
from penstock.confined.scope import JobScope
from penstock.media import frontend
from penstock.media.content import MediaContent, read_item
from penstock.protocol.errors import InputError

OPTIONS: Any = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 100}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = "<|user|><|vision_start|><|image_pad|><|vision_end|>Say<|assistant|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, enable_mm_embeds=True) as opened:
        opened.frontend.media.pool = InProcessMedia(folder)
        yield opened


def ask(llm: LLM, image: Any, uuid: str | None = None) -> list[int]:
    data = {"image": [image]}
    prompt = {"prompt": PROMPT, "multi_modal_data": data, "multi_modal_uuids": {"image": [uuid]}}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_an_item_may_be_left_out_after_it_was_sent_with_a_uuid(llm: LLM) -> None:
    image = picture(60, 60)
    expected = ask(llm, image, "cat")
    assert ask(llm, None, "cat") == expected
    with pytest.raises(InputError, match="nothing is kept for uuid 'dog'"):
        ask(llm, None, "dog")


def test_a_chat_takes_the_parts_of_the_python_api(llm: LLM) -> None:
    """An image of Pillow's, a video's frames, and text, as `generate` takes them."""
    image, frames = picture(60, 60), clip(56, 28, 4)
    parts = [
        {"type": "image_pil", "image_pil": image},
        {"type": "video", "video": (frames, {"fps": 2})},
        {"type": "text", "text": "Say"},
    ]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    pad = "<|vision_start|><|{}_pad|><|vision_end|>"
    prompt = f"<|user|>{pad.format('image')}{pad.format('video')}Say<|assistant|>"
    data = {"video": [(frames, {"fps": 2})], "image": [image]}
    (expected,) = llm.generate({"prompt": prompt, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
def test_memory_stays_flat_over_2000_images(folder: Path) -> None:
    """That of this process and of the one that processes images, whose cache holds a few of them.
    At the end no file is left."""
    options = {**OPTIONS, "mm_processor_cache_gb": 2**20 / 2**30}
    before = set(Path("/dev/shm").glob(f"penstock-media-{os.getpid()}-*"))
    own: list[int] = []
    workers: dict[int, list[int]] = {}
    with LLM(str(folder), **options) as opened:
        media = opened.frontend.media
        for number in range(2000):
            ask(opened, picture(60, 60, number))
            if number % 500 == 499:
                files = set(Path("/dev/shm").glob(f"penstock-media-{os.getpid()}-*")) - before
                assert sum(file.stat().st_size for file in files) <= 2 * 2**20
                own.append(resident_bytes(os.getpid()))
                for pid in media.pool.pids():
                    workers.setdefault(pid, []).append(resident_bytes(pid))
    assert set(Path("/dev/shm").glob(f"penstock-media-{os.getpid()}-*")) <= before
    assert own[-1] - own[0] < 32 * 2**20, own
    assert any(len(sizes) > 1 for sizes in workers.values()), "one process stays"
    for sizes in workers.values():
        assert sizes[-1] - sizes[0] < 32 * 2**20, sizes


def test_a_uuid_belongs_to_its_tenant_and_its_options(llm: LLM) -> None:
    media = llm.frontend.media
    sent = read_item(picture(60, 60, 5), "image", "x", "secret")
    left_out = MediaContent(modality="image", where="x", uuid="secret")
    JobScope("alice").run(media.process, sent)
    mine: Any = JobScope("alice").run(media.process, MediaContent(
        modality="image", where="x", uuid="secret"))  # fmt: skip
    assert mine.num_bytes
    with pytest.raises(InputError, match="nothing is kept"):
        JobScope("bob").run(media.process, left_out)
    smaller = MediaContent(
        modality="image", where="x", uuid="secret", kwargs={"max_pixels": 28 * 28 * 4}
    )
    with pytest.raises(InputError, match="nothing is kept"):
        JobScope("alice").run(media.process, smaller)


def our_files() -> set[Path]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {path for each in folders for path in each.glob(f"penstock-media-{os.getpid()}-*")}


def full(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """Nothing more can be written to these folders."""
    write = Path.write_bytes

    def write_if_free(path: Path, content: bytes) -> int:
        if str(path.parent) in folders:
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_if_free)


def test_without_room_in_shared_memory_media_are_in_temporary_files(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.ones((6, 64), np.float32)
    embeds = {"image_embeds": rows, "image_grid_thw": [1, 6, 4]}
    expected = [ask(llm, picture(60, 60, 70)), ask(llm, embeds)]
    media, before = llm.frontend.media, our_files()
    media._cache.clear()
    media._cache_bytes = 0
    full(monkeypatch, "/dev/shm")
    assert [ask(llm, picture(60, 60, 70)), ask(llm, embeds)] == expected
    new = our_files() - before
    assert {path.parent for path in new} == {Path(tempfile.gettempdir())}
    full(monkeypatch, "/dev/shm", tempfile.gettempdir())
    for image in (picture(60, 60, 71), {**embeds, "image_embeds": 2 * rows}):
        with pytest.raises(PoolFull, match="have no room for processed media"):
            ask(llm, image)
    assert our_files() - before == new, "nothing is left of what was refused"


def test_the_cache_ends_where_shared_memory_is_nearly_full(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    media, before = llm.frontend.media, our_files()
    ask(llm, picture(60, 60, 72))
    assert our_files() - before
    assert not media._folder.is_short_of_room()
    statvfs = os.statvfs("/dev/shm")
    sizes = SimpleNamespace(f_bavail=statvfs.f_blocks // 5, f_blocks=statvfs.f_blocks)
    monkeypatch.setattr(os, "statvfs", lambda path: sizes)
    ask(llm, picture(60, 60, 73))
    assert not media._cache
    assert not our_files()
    assert media._cache_bytes == 0


class SlowMedia(InProcessMedia):
    """Begins when it may. Its first answer is lost if it `loses` that."""

    def __init__(self, folder: Path, loses: bool) -> None:
        super().__init__(folder)
        self.may_begin = threading.Event()
        self.num_items = 0
        self.loses = loses

    def submit(self, payload: bytes, tenant: str = "") -> InProcessMedia:
        assert self.may_begin.wait(120)
        self.num_items += 1
        if self.loses and self.num_items == 1:
            raise WorkerLost("its process ended")
        return super().submit(payload, tenant)


def with_slow_media(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, loses: bool = False
) -> tuple[Any, SlowMedia]:
    media, pool = llm.frontend.media, SlowMedia(folder, loses)
    media.info()
    monkeypatch.setattr(media, "pool", pool)
    return media, pool


@pytest.mark.parametrize("loses", [False, True])
def test_threads_that_ask_for_an_item_at_once_process_it_once(
    llm: LLM, folder: Path, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that fails, another one of them does."""
    media, pool = with_slow_media(llm, folder, monkeypatch, loses)
    if not loses:
        monkeypatch.setattr(media, "_keep", lambda item: None)  # they share what runs
    lookups: list[bool] = []
    monkeypatch.setattr(media, "on_lookup", lookups.append)
    waiting, wait = threading.Semaphore(0), frontend.waiting

    def counted(work: Any) -> Any:
        waiting.release()
        return wait(work)

    monkeypatch.setattr(frontend, "waiting", counted)
    content = read_item(picture(60, 60, 80 + loses), "image", "x")
    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(JobScope("a").run, media.process, content) for _ in range(5)]
        for _ in range(4):
            assert waiting.acquire(timeout=120)
        pool.may_begin.set()
        errors = [each.exception(120) for each in asked]
    assert [type(each) for each in errors if each] == [WorkerLost] * loses
    assert pool.num_items == lookups.count(False) == 1 + loses
    assert len(lookups) == 5
    assert not media._running


def test_an_item_is_not_waited_for_if_another_tenant_has_it_processed(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media, pool = with_slow_media(llm, folder, monkeypatch)
    content = read_item(picture(60, 60, 85), "image", "x")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(JobScope(each).run, media.process, content) for each in "ab"]
        eventually(lambda: len(media._running) == 2)
        pool.may_begin.set()
        first, second = (each.result(120) for each in asked)
    assert pool.num_items == 2
    assert first.hash == second.hash


def test_a_thread_that_waits_for_an_item_of_another_one_can_leave(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media, pool = with_slow_media(llm, folder, monkeypatch)
    content = read_item(picture(60, 60, 90), "image", "x")
    leaver = JobScope()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(JobScope().run, media.process, content)
        eventually(lambda: bool(media._running))
        other = threads.submit(leaver.run, media.process, content)
        leaver.cancel()
        with pytest.raises(CancelledError):
            other.result(120)
        assert not first.done()
        pool.may_begin.set()
        assert first.result(120).num_bytes


def encoded(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def messages(embeds: str, **more: Any) -> list[Any]:
    part = {"type": "image_embeds", "image_embeds": embeds, **more}
    return [{"role": "user", "content": [part, {"type": "text", "text": "Say"}]}]


def test_embeddings_replace_the_tower(llm: LLM) -> None:
    """The tower's own rows, sent as embeddings, give the tokens of the image."""
    image = picture(56, 84)
    expected = ask(llm, image)
    store = llm.engine.executor.worker.runner.media
    rows = list(store._rows.values())[-1]
    data = {"image_embeds": rows, "image_grid_thw": [1, 6, 4]}
    assert ask(llm, data) == expected
    array = rows.float().numpy()
    (output,) = llm.chat(messages(encoded(array), image_grid_thw=[1, 6, 4]), GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


VIDEO_PROMPT = "<|user|>{}Say<|assistant|>"


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_vl", "glm4v")),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("llava_onevision", "internvl")),
    ],
)
def test_embeddings_of_a_video_replace_the_tower(name: str, tmp_path: Path) -> None:
    """The prompt has the same times, and the tokens the same positions."""
    folder = make_vision_checkpoint(tmp_path, name)
    prompt = VIDEO_PROMPT.format(VARIANTS[name].video)
    with LLM(str(folder), **OPTIONS, enable_mm_embeds=True) as llm:
        llm.frontend.media.pool = InProcessMedia(folder)

        def tokens(video: Any) -> tuple[Any, Any]:
            given = {"prompt": prompt, "multi_modal_data": {"video": [video]}}
            (output,) = llm.generate(given, GREEDY, use_tqdm=False)
            return output.prompt_token_ids, output.outputs[0].token_ids

        expected = tokens((clip(56, 84, 4), {"fps": 2}))
        (rows,) = llm.engine.executor.worker.runner.media._rows.values()
        data = {"video_embeds": rows, "fps": 2}
        if name == "internvl":
            with pytest.raises(InputError, match="takes videos, but no embeddings"):
                tokens(data)
            return
        if name != "llava_onevision":
            with pytest.raises(InputError, match="needs video_grid_thw"):
                tokens(data)
            data["video_grid_thw"] = [2, 6, 4]
        assert tokens(data) == expected
        part = {"type": "video_embeds", **data, "video_embeds": encoded(rows.float().numpy())}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "Say"}]}]
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == expected


@pytest.mark.parametrize(
    ("array", "grid", "says"),
    [
        (np.zeros((6, 63), np.float32), [1, 6, 4], r"\[rows, 64\]"),
        (np.zeros((6, 64), np.float32), [1, 6, 6], "image_grid_thw"),
        (np.zeros((6, 64), np.float32), None, "image_grid_thw"),
        (np.zeros((6, 64), np.float32), [1, -6, 4], "image_grid_thw"),
        (np.zeros((6, 64), np.int64), [1, 6, 4], "floats"),
        (np.zeros((6, 64), np.float64), [1, 6, 4], "floats"),
        (np.zeros(64, np.float32), [1, 6, 4], "floats"),
        (np.full((6, 64), np.nan, np.float32), [1, 6, 4], "NaN"),
        (np.full((6, 64), np.inf, np.float16), [1, 6, 4], "NaN or infinity"),
        (np.zeros((20000, 64), np.float16), [1, 400, 200], "encoder_cache_tokens"),
        (np.array([["a"]], dtype=object), [1, 6, 4], "npy"),
    ],
)
def test_wrong_embeddings_are_refused(llm: LLM, array: Any, grid: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        llm.chat(messages(encoded(array), image_grid_thw=grid), GREEDY, use_tqdm=False)


def test_embeddings_that_are_no_file_are_refused(llm: LLM) -> None:
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9999999, 64)}"
    )
    for given in ("", "!!", base64.b64encode(b"abc").decode(), base64.b64encode(header).decode()):
        with pytest.raises(InputError, match="npy"):
            llm.chat(messages(given), GREEDY, use_tqdm=False)


def test_embeddings_need_the_option(llm: LLM) -> None:
    media = llm.frontend.media
    content = read_item(np.zeros((6, 64), np.float32), "image", "x")
    config = media.config
    object.__setattr__(config, "enable_mm_embeds", False)
    with pytest.raises(InputError, match="enable-mm-embeds"):
        media.process(content)
    object.__setattr__(config, "enable_mm_embeds", True)
