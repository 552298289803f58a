"""The work of a confined process: decode images and run a checkpoint's processor on them."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.media.decode import BadMedia, decode_image, image_of
from penstock.media.messages import (
    DescribeProcessor,
    MediaRequest,
    MediaSetup,
    ProcessedMedia,
    ProcessMedia,
    ProcessorInfo,
)
from penstock.media.processor import load_processor, read_settings
from penstock.protocol.media import MediaTensor

ENTRY = "penstock.media.worker:make_worker"
ALIGNMENT = 64  # bytes, of tensors in a file
MAX_FACT = 64  # integers; a larger tensor goes to the file


def make_worker(setup: bytes) -> Callable[[bytes], bytes]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = msgspec.json.decode(setup, type=MediaSetup).folder
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


def describe(processor: Any, config: Mapping[str, Any]) -> ProcessorInfo:
    """`config`: the config.json, which says which tokens embeddings replace."""
    ids = processor.tokenizer.convert_tokens_to_ids
    image = processor.image_processor
    has_grid = "image_grid_thw" in getattr(image, "model_input_names", ())
    image_token_id = ids(processor.image_token)
    row = config.get("image_token_id", config.get("image_token_index"))
    return ProcessorInfo(
        processor.image_token,
        image_token_id,
        row if isinstance(row, int) else image_token_id,
        merge=image.merge_size if has_grid else 0,
    )


def process(processor: Any, info: ProcessorInfo, request: ProcessMedia) -> ProcessedMedia:
    if request.shape is None:
        image = decode_image(request.data, request.max_pixels, request.io_kwargs)
    else:
        image = image_of(request.data, request.shape, request.max_pixels)
    try:
        kwargs = processor._merge_kwargs(
            processor.valid_processor_kwargs,
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs,
            **request.kwargs,
        )
        found, (text,) = processor._process_images([image], **kwargs["images_kwargs"])
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadMedia(
            f"the model's processor cannot take an image of {image.width} x {image.height} pixels: "
            f"{error}"
        ) from error
    row = processor.tokenizer.convert_ids_to_tokens(info.row_token_id)
    run = f"(?:{re.escape(row)})+"
    runs = [len(found_run) // len(row) for found_run in re.findall(run, text)]
    tensors, facts = write_tensors(found, request.path)
    return ProcessedMedia(
        text=re.sub(run, lambda _: row, text),
        runs=runs,
        tensors=tensors,
        facts=facts,
    )


def write_tensors(
    found: Mapping[str, Any], path: str
) -> tuple[list[MediaTensor], dict[str, list[int]]]:
    """Write tensors to a file. Few integers are returned as facts, under their names without the
    modality."""
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
        tensors.append(MediaTensor(name, array.dtype.name, array.shape, file.tell()))
        file.write(np.ascontiguousarray(array).tobytes())
    Path(path).write_bytes(file.getbuffer())
    return tensors, facts


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
