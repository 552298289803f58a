"""Processors in the place of those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_vision import make_tokenizer, picture
from vision_variants import VARIANTS

from penstock.media.processor import load_processor


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
