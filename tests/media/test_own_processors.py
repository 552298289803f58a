"""Processors in the place of those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_vision import make_tokenizer, picture
from vision_variants import VARIANTS

from penstock.media.own_processors import best_canvas, fit
from penstock.media.processor import load_processor


def load(folder: Path, name: str) -> Any:
    """The processor of a variant, without a model."""
    variant = VARIANTS[name]
    make_tokenizer(folder, variant)
    (folder / "preprocessor_config.json").write_text(json.dumps(variant.processor))
    (folder / "processor_config.json").write_text(json.dumps(variant.own))
    return load_processor(str(folder))


@pytest.mark.parametrize(
    ("height", "width", "is_largest", "expected"),
    [
        (200, 300, False, (1, 2)),
        (200, 300, True, (2, 2)),
        (100, 100, False, (1, 1)),
        (400, 400, False, (2, 2)),
        (30, 900, False, (1, 4)),
        (5000, 5000, False, (2, 2)),
        (900, 100, False, (4, 1)),
    ],
)
def test_llama_4_tiles_scale_an_image_least(
    height: int, width: int, is_largest: bool, expected: tuple[int, int]
) -> None:
    assert best_canvas(height, width, 224, 4, is_largest) == expected


def test_an_image_keeps_its_shape() -> None:
    assert fit(200, 300, 450, 200) == (133, 200)
    assert fit(800, 600, 450, 1300) == (450, 337)
    assert fit(1, 3000, 56, 56) == (1, 56)


def test_llama_4_has_tiles_with_black_beside_them_and_the_whole_image(tmp_path: Path) -> None:
    processor = load(tmp_path, "llama4")
    white = Image.new("RGB", (100, 40), (255, 255, 255))
    inputs, (text,) = processor._process_images([white])
    tile = "<|patch|>" * 4
    assert text == (
        f"<|image_start|>{tile}<|tile_x_separator|>{tile}<|tile_y_separator|>"
        f"<|image|>{tile}<|image_end|>"
    )
    pixels = inputs["pixel_values"]
    assert pixels.shape == (3, 3, 56, 56)
    assert pixels.min() == -1.0
    np.testing.assert_array_equal(pixels[0, :, :40], 1.0)  # 100 x 40 pixels are not enlarged
    np.testing.assert_array_equal(pixels[0, :, 40:], -1.0)
    np.testing.assert_array_equal(pixels[1, :, :40, :44], 1.0)
    np.testing.assert_array_equal(pixels[1, :, :, 44:], -1.0)
    np.testing.assert_array_equal(pixels[2], 1.0)


@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_pixtral_ends_each_row_and_the_image(suffix: str, tmp_path: Path) -> None:
    variant = VARIANTS["mistral3"]
    make_tokenizer(tmp_path, variant)
    given = {**variant.processor, "image_processor_type": f"PixtralImageProcessor{suffix}"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    (tmp_path / "processor_config.json").write_text(json.dumps(variant.own))
    processor = load_processor(str(tmp_path))
    inputs, (text,) = processor._process_images([picture(50, 90)])
    rows = ["[IMG][IMG]"] * 4  # 28 pixels each
    assert text == "[IMG_BREAK]".join(rows) + "[IMG_END]"
    assert inputs["image_sizes"] == [(112, 56)]
