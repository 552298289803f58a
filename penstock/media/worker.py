"""The work of a confined process: decode media and run a checkpoint's processor on them."""

from __future__ import annotations

import functools
import io
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from penstock.media.decode import BadMedia, decode_image, image_of
from penstock.media.files import write_file
from penstock.media.messages import (
    DescribeProcessor,
    MediaRequest,
    MediaSetup,
    ProcessedMedia,
    ProcessMedia,
    ProcessorInfo,
)
from penstock.media.processor import load_processor, read_settings
from penstock.media.video import Sampling, decode_video, video_of
from penstock.protocol.media import MediaTensor

ENTRY = "penstock.media.worker:make_worker"
ALIGNMENT = 64  # bytes, of tensors in a file
MAX_FACT = 64  # integers; a larger tensor goes to the file
# Arguments that must be those of the model's files.
MODEL_KWARGS = ("crop_size", "image_grid_pinpoints")


def make_worker(setup: bytes) -> Callable[[bytes], bytes]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with checkpoint_folder(msgspec.json.decode(setup, type=MediaSetup)) as folder:
        processor = load_processor(folder)
        info = describe(processor, read_settings(Path(folder) / "config.json"))
    read = msgspec.msgpack.Decoder(MediaRequest).decode

    def work(job: bytes) -> bytes:
        request = read(job)
        if isinstance(request, DescribeProcessor):
            return msgspec.msgpack.encode(info)
        try:
            return msgspec.msgpack.encode(process(processor, info, request))
        except BadMedia as error:
            return msgspec.msgpack.encode(ProcessedMedia(error=str(error)))

    return work


@contextmanager
def checkpoint_folder(setup: MediaSetup) -> Iterator[str]:
    """The folder of the processor's files, which need not exist afterwards."""
    if not setup.files:
        yield setup.folder
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, text in setup.files.items():
            (Path(folder) / name).write_text(text)
        yield folder


def describe(processor: Any, config: Mapping[str, Any]) -> ProcessorInfo:
    """`config`: the config.json, which says which tokens embeddings replace."""
    from transformers import PaliGemmaProcessor

    def number(token: str) -> int | None:
        found = processor.tokenizer.convert_tokens_to_ids(token)
        return found if found != processor.tokenizer.unk_token_id else None

    def row(modality: str, otherwise: int | None) -> int | None:
        found = config.get(f"{modality}_token_id", config.get(f"{modality}_token_index"))
        return found if isinstance(found, int) else otherwise

    image = processor.image_processor
    has_grid = "image_grid_thw" in getattr(image, "model_input_names", ())
    image_token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    row_token_id = row("image", image_token_id)
    assert row_token_id is not None
    is_paligemma = isinstance(processor, PaliGemmaProcessor)
    info = ProcessorInfo(
        processor.image_token,
        image_token_id,
        row_token_id,
        merge=image.merge_size if has_grid else 0,
        after_media=processor.tokenizer.bos_token if is_paligemma else "",
        prompt_end="\n" if is_paligemma else "",
    )
    videos = getattr(processor, "video_processor", None)
    if videos is None:
        return info
    own = row_token_id if videos.rows_are_of_images else row("video", row_token_id)
    return msgspec.structs.replace(
        info,
        video_token=processor.video_token,
        video_token_id=number(processor.video_token),
        video_row_token_id=own,
    )


def process(processor: Any, info: ProcessorInfo, request: ProcessMedia) -> ProcessedMedia:
    if request.modality == "video":
        found, text = process_video(processor, request)
        row_id = info.video_row_token_id
    else:
        found, text = process_image(processor, request)
        row_id = info.row_token_id
        if request.kwargs:
            check_form(processor, info, found, text)
    row = processor.tokenizer.convert_ids_to_tokens(row_id)
    run = f"(?:{re.escape(row)})+"
    runs = [len(found_run) // len(row) for found_run in re.findall(run, text)]
    content, tensors, facts = pack_tensors(found)
    return ProcessedMedia(
        path=write_file(request.places, content),
        text=re.sub(run, lambda _: row, text),
        runs=runs,
        tensors=tensors,
        facts=facts,
    )


def process_image(processor: Any, request: ProcessMedia) -> tuple[Mapping[str, Any], str]:
    """The processor's output, and the image's text."""
    if request.shape is None:
        image = decode_image(request.data, request.max_pixels, request.io_kwargs)
    else:
        image = image_of(request.data, request.shape, request.max_pixels)
    with refusing(request.kwargs):
        try:
            return run_processor(processor, image, request.kwargs)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise BadMedia(
                f"the model's processor cannot take an image of {image.width} x {image.height} "
                f"pixels: {error}"
            ) from error


@contextmanager
def refusing(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """With arguments of a request, any error of a processor is about these."""
    try:
        yield
    except (BadMedia, MemoryError):
        raise
    except Exception as error:
        if not kwargs:
            raise
        message = " ".join(str(error).split())
        raise BadMedia(f"mm_processor_kwargs are wrong: {message}"[:400]) from error


def run_processor(
    processor: Any, image: Image.Image, given: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str]:
    kwargs = processor._merge_kwargs(
        processor.valid_processor_kwargs,
        tokenizer_init_kwargs=processor.tokenizer.init_kwargs,
        **given,
    )["images_kwargs"]
    for name in MODEL_KWARGS:
        if kwargs.get(name) not in (None, getattr(processor.image_processor, name, None)):
            raise BadMedia(f"mm_processor_kwargs are wrong: {name} is fixed by the model")
    found, (text,) = processor._process_images([image], **kwargs)
    return found, text


def check_form(processor: Any, info: ProcessorInfo, found: Mapping[str, Any], text: str) -> None:
    """Refuse tensors that the model cannot take: arguments of a request have changed their form."""
    pixels = np.asarray(found["pixel_values"])
    if not np.isfinite(pixels).all():
        raise BadMedia("mm_processor_kwargs are wrong: pixels become infinite")
    form = model_form(processor)
    if form is not None and _form(pixels) != form:
        raise BadMedia(
            f"mm_processor_kwargs are wrong: the model takes tensors of {list(form)}, got "
            f"{list(_form(pixels))}"
        )
    if info.merge:
        _, height, width = np.ravel(found["image_grid_thw"])
        num_rows = height * width // info.merge**2
        row = processor.tokenizer.convert_ids_to_tokens(info.row_token_id)
        if height % info.merge or width % info.merge or text.count(row) != num_rows:
            raise BadMedia("mm_processor_kwargs are wrong: merge_size is fixed by the model")


@functools.cache
def model_form(processor: Any) -> tuple[int, ...] | None:
    """The size of a tile or a patch; None: images have their own."""
    images = (Image.new("RGB", size) for size in ((320, 320), (640, 320)))
    found = [run_processor(processor, image, {})[0]["pixel_values"] for image in images]
    first, second = (_form(np.asarray(pixels)) for pixels in found)
    return first if first == second else None


def _form(pixels: np.ndarray[Any, Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = pixels.shape
    return shape[-2:] if len(shape) > 2 else shape[-1:]


def process_video(processor: Any, request: ProcessMedia) -> tuple[Mapping[str, Any], str]:
    """The processor's output, and the video's text."""
    with refusing(request.kwargs):
        videos = processor.video_processor.with_kwargs(request.kwargs)
    if request.grid:
        video = videos.embedded(request.grid, request.facts.get("fps"))
    elif request.shape is None:
        sampling = Sampling.of(request.io_kwargs, videos.sampling)
        recovers = request.io_kwargs.get("frame_recovery", False)
        video = decode_video(request.data, sampling, recovers, videos.keep)
    else:
        video = video_of(request.data, request.shape, request.facts, videos.keep)
    first = video.frames[0] if video.frames else np.zeros((3, 1, 1), np.uint8)
    found, (text,) = processor._process_videos([first[None]], video=video)
    seconds = found.pop("second_per_grid_ts", None)
    if seconds is not None:  # as the 32-bit float that the model's code makes of it
        found["video_seconds"] = np.array(np.float32(seconds[0]).as_integer_ratio())
    return found, text


def pack_tensors(
    found: Mapping[str, Any],
) -> tuple[memoryview, list[MediaTensor], dict[str, list[int]]]:
    """The content of a file, and where the tensors are in it. Few integers are returned as facts,
    under their names without the modality."""
    tensors: list[MediaTensor] = []
    facts: dict[str, list[int]] = {}
    file = io.BytesIO()
    for name, value in found.items():
        array = _as_array(value)
        if array is None:
            continue
        if array.dtype.kind in "iub" and array.size <= MAX_FACT:
            facts[re.sub("^(image|video)_", "", name)] = array.astype(np.int64).ravel().tolist()
            continue
        if array.dtype.kind in "iub":
            array = array.astype(np.int64)
        file.write(bytes(-file.tell() % ALIGNMENT))
        plain = name.removesuffix("_videos")  # towers take frames as images
        tensors.append(MediaTensor(plain, array.dtype.name, array.shape, file.tell()))
        file.write(np.ascontiguousarray(array).tobytes())
    return file.getbuffer(), tensors, facts


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """A tensor of the processor's output, whose items may be in lists."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "shape"):
        value = np.stack([np.asarray(each) for each in value])
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "iubf" else None
