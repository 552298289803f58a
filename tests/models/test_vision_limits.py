"""Which media a vision-language model takes, and when its tower is not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_vision import VARIANTS, make_vision_checkpoint, picture

from penstock import LLM, SamplingParams
from penstock.media.video_processor import VIDEO_PROCESSORS
from penstock.models.architectures import VISION
from penstock.models.registry import find_model
from penstock.protocol.errors import InputError

OPTIONS = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 40}


@pytest.mark.parametrize(
    ("name", "limits", "has_tower"),
    [
        ("llava", {"image": 0}, False),
        ("llava", {"video": 0}, True),
        ("qwen2_vl", {"image": 0}, True),
        ("qwen2_vl", {"image": 0, "video": 0}, False),
    ],
)
def test_a_tower_is_loaded_if_the_model_takes_what_prompts_may_have(
    name: str, limits: dict[str, int], has_tower: bool, tmp_path: Path
) -> None:
    folder = make_vision_checkpoint(tmp_path, name)
    with LLM(str(folder), **OPTIONS, limit_mm_per_prompt=limits) as llm:
        model = llm.engine.executor.worker.model
        assert any("vis" in path for path, _ in model.named_modules()) == has_tower
        assert llm.frontend.takes_images == ("image" not in limits)
        if has_tower:
            return
        params = SamplingParams(max_tokens=1)
        given = {"prompt": "<image>", "multi_modal_data": {"image": picture(8, 8)}}
        with pytest.raises(InputError, match=r"tower is not loaded \(limit_mm_per_prompt"):
            llm.generate(given, params, use_tqdm=False)
        part = {"type": "image_pil", "image_pil": picture(8, 8)}
        with pytest.raises(InputError, match=r"content\[0\] is an image, but .* not loaded"):
            llm.chat([{"role": "user", "content": [part]}], params, use_tqdm=False)


@pytest.mark.parametrize("name", VISION)
def test_models_take_the_modalities_of_their_processors(name: str) -> None:
    processors = {VARIANTS[one].processor.get("processor_class") for one in VISION[name].parity}
    model: Any = find_model([name], [])
    assert ("video" in model.modalities) == any(each in VIDEO_PROCESSORS for each in processors)
