"""What the media processes make of an image is what transformers' own processors make of it."""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import make_tokenizer, picture
from vision_variants import VARIANTS

from penstock.media.messages import (
    DescribeProcessor,
    MediaSetup,
    ProcessedMedia,
    ProcessMedia,
    ProcessorInfo,
)
from penstock.media.worker import make_worker

SHAPES = ((100, 60), (40, 90), (64, 64), (200, 30), (31, 117))  # width and height
NEED_TORCHVISION = ("PixtralProcessor", "Llama4Processor")


def make_folder(folder: Path, name: str) -> None:
    """A checkpoint without weights."""
    variant = VARIANTS[name]
    ids = make_tokenizer(folder, variant)
    (folder / "preprocessor_config.json").write_text(json.dumps(variant.processor))
    if variant.own:
        (folder / "processor_config.json").write_text(json.dumps(variant.own))
    outer = variant.outer or {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    config = {key: ids.get(value, value) for key, value in outer.items() if isinstance(value, str)}
    (folder / "config.json").write_text(json.dumps(config))


def theirs(folder: Path, name: str, backend: str) -> Any:
    """transformers' class as it is, without its part for videos."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    class_name = VARIANTS[name].processor["processor_class"]
    plain = class_name.removesuffix("Processor").replace("_", "").lower()
    names = (each.name for each in pkgutil.iter_modules(transformers.models.__path__))
    (module,) = (each for each in names if each.replace("_", "") == plain)
    found: Any = importlib.import_module(f"transformers.models.{module}.processing_{module}")

    class Their(getattr(found, class_name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)  # None, too

    parts = dict.fromkeys(Their.get_attributes())
    parts["image_processor"] = AutoImageProcessor.from_pretrained(folder, backend=backend)
    parts["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    return Their(**parts, **VARIANTS[name].own)


class Ours:
    """The work of a media process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tensors"
        self._work = make_worker(msgspec.json.encode(MediaSetup(str(folder))))
        asked = msgspec.msgpack.encode(DescribeProcessor())
        self.info = msgspec.msgpack.decode(self._work(asked), type=ProcessorInfo)

    def process(self, data: bytes, **kwargs: Any) -> ProcessedMedia:
        asked = ProcessMedia(
            modality="image",
            data=data,
            places=[str(self.path)],
            kwargs=kwargs,
            max_pixels=2**20,
        )
        return msgspec.msgpack.decode(
            self._work(msgspec.msgpack.encode(asked)), type=ProcessedMedia
        )

    def pixels(self, answer: ProcessedMedia) -> torch.Tensor:
        (tensor,) = (each for each in answer.tensors if each.name == "pixel_values")
        count = int(np.prod(tensor.shape))
        array = np.fromfile(self.path, tensor.dtype, count, offset=tensor.start)
        return torch.from_numpy(array.reshape(tensor.shape))

    def text(self, answer: ProcessedMedia, row: str) -> str:
        """The prompt of the image alone."""
        runs = iter(answer.runs)
        text = re.sub(re.escape(row), lambda _: row * next(runs), answer.text)
        return text + self.info.after_media + self.info.prompt_end


@pytest.mark.parametrize("backend", ["pil", pytest.param("torchvision", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VARIANTS)
def test_pixels_and_placeholders_are_those_of_transformers(
    name: str, backend: str, tmp_path: Path
) -> None:
    """With Pillow to the last bit, of noise. torchvision clips less and may round each side's
    resizing to another level: compared with smooth images."""
    class_name = VARIANTS[name].processor["processor_class"]
    if backend == "pil" and class_name in NEED_TORCHVISION:
        return
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    make_folder(tmp_path, name)
    ours, their = Ours(tmp_path), theirs(tmp_path, name, backend)
    std = min(getattr(their.image_processor, "image_std", None) or [1.0])
    for shape in SHAPES:
        image = picture(*shape)
        if backend == "torchvision":
            image = picture(5, 4).resize(shape, Image.Resampling.BILINEAR)
        file = io.BytesIO()
        image.save(file, "PNG")
        answer = ours.process(file.getvalue())
        expected = their(text=[their.image_token], images=[image], return_tensors="pt")
        row = their.tokenizer.convert_ids_to_tokens(ours.info.row_token_id)
        token_ids = their.tokenizer([ours.text(answer, row)])["input_ids"][0]
        assert token_ids == expected["input_ids"][0].tolist()
        assert sum(answer.runs) == token_ids.count(ours.info.row_token_id) > 0
        pixels = expected["pixel_values"]
        found = ours.pixels(answer).reshape(pixels.shape)
        if backend == "pil":
            assert torch.equal(found, pixels)
        else:
            difference = float((found - pixels.float()).abs().max())
            assert difference <= 2.01 / 255 / std


WRONG_KWARGS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_5_vl", {"patch_size": 7}, r"takes tensors of \[1176\], got \[294\]"),
    ("qwen2_5_vl", {"temporal_patch_size": 4}, "takes tensors of"),
    ("qwen2_5_vl", {"merge_size": 3}, "merge_size is fixed"),
    ("qwen2_5_vl", {"max_pixels": "many"}, "max_pixels"),
    ("qwen2_5_vl", {"image_mean": [1]}, "image_mean"),
    ("qwen2_5_vl", {"rescale_factor": 1e300}, "infinite"),
    ("qwen2_5_vl", {"images_kwargs": 5}, "mm_processor_kwargs are wrong"),
    ("qwen2_5_vl", {"size": 5}, "size"),
    ("smolvlm", {"max_image_size": {"longest_edge": 112}}, r"\[56, 56\], got \[112, 112\]"),
    ("gemma3", {"size": {"height": 84, "width": 84}}, r"\[112, 112\], got \[84, 84\]"),
    ("llava_next", {"image_grid_pinpoints": [[112, 112]]}, "image_grid_pinpoints is fixed"),
    ("llava_onevision", {"crop_size": {"height": 84, "width": 84}}, "crop_size is fixed"),
]


@pytest.mark.parametrize(
    ("name", "kwargs", "says"), WRONG_KWARGS, ids=[f"{n} {[*k]}" for n, k, _ in WRONG_KWARGS]
)
def test_arguments_that_the_model_cannot_take_are_refused(
    name: str, kwargs: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Here, before a step of the engine fails."""
    make_folder(tmp_path, name)
    file = io.BytesIO()
    picture(100, 60).save(file, "PNG")
    ours = Ours(tmp_path)
    assert re.search(says, ours.process(file.getvalue(), **kwargs).error or "none")
    assert ours.process(file.getvalue()).error is None


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("qwen2_5_vl", {"max_pixels": 28 * 28 * 4}),
        ("qwen2_5_vl", {"images_kwargs": {"max_pixels": 28 * 28 * 4}}),
        ("smolvlm", {"do_image_splitting": False}),
        ("pixtral", {"size": {"longest_edge": 56}}),
        ("internvl", {"max_patches": 1}),
    ],
)
def test_arguments_may_make_images_smaller(
    name: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    make_folder(tmp_path, name)
    file = io.BytesIO()
    picture(200, 60).save(file, "PNG")
    ours = Ours(tmp_path)
    smaller, plain = ours.process(file.getvalue(), **kwargs), ours.process(file.getvalue())
    assert smaller.error is None
    assert sum(smaller.runs) < sum(plain.runs)
