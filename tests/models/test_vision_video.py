"""Vision-language models give transformers' tokens for videos, alone and among images and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_vision import (
    VARIANTS,
    InProcessMedia,
    Reference,
    clip,
    make_vision_checkpoint,
    picture,
)

from penstock import LLM, SamplingParams

NAMES = [name for name, variant in VARIANTS.items() if variant.video]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 200,
    "encoder_cache_tokens": 256,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
FACTS = {"fps": 10.0, "frames_indices": [0, 9, 17, 26, 40], "total_num_frames": 41}


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    name = request.param
    folder = make_vision_checkpoint(tmp_path_factory.mktemp(name), name)
    return folder, Reference(folder, name)


WAYS: dict[str, dict[str, Any]] = {  # options of the engine
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "whole prompts": {},
    "preempted": {},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "chunks of 7" else SLOW) for way in WAYS]
)
def test_tokens_and_logprobs_equal_transformers(model: tuple[Path, Reference], way: str) -> None:
    """A video before text, one among an image and text, and a slow one whose times lie beyond the
    positions of the text after it: in one batch, and once more from the prefix cache."""
    folder, reference = model
    options = {**OPTIONS, **WAYS[way]}
    num_tokens = 40 if way == "preempted" else 8
    image, video = reference.variant.image, reference.variant.video
    frames = clip(100, 60, 5)
    mixed = f"<|user|>What{video} is<|assistant|>it {image} here<|assistant|>", [picture(50, 90)]
    if reference.variant.model.startswith(("Smol", "Glm")):  # their classes cannot take both
        mixed = f"<|user|>What{video} is<|assistant|>", []
    given: list[tuple[str, list[Any], dict[str, Any]]] = [
        (f"<|user|>{video}Say<|assistant|>", [], {}),
        (*mixed, FACTS),
        (f"<|user|>{video}", [], FACTS | {"fps": 2.0}),
    ]
    expected = [
        reference.generate_scored(text, images, num_tokens, (frames, facts))
        for text, images, facts in given
    ]
    prompts = [
        {
            "prompt": text,
            "multi_modal_data": {"image": images, "video": [(frames, facts)]},
        }
        for text, images, facts in given
    ]
    if way == "preempted":  # two prompts fit, but not what they grow to
        lengths = [len(prompt_ids) for prompt_ids, _, _ in expected]
        options["max_model_len"] = max(lengths) + num_tokens
        num_blocks = sum(length // 16 + 1 for length in lengths[:2]) + 2
        options["num_gpu_blocks_override"] = max(num_blocks, options["max_model_len"] // 16 + 2)
    params = msgspec.structs.replace(GREEDY, max_tokens=num_tokens)
    with LLM(str(folder), **options) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, (prompt_ids, token_ids, logprobs) in zip(outputs, expected, strict=True):
                assert output.prompt_token_ids == prompt_ids
                (completion,) = output.outputs
                assert completion.token_ids == token_ids
                found = zip(completion.logprobs, token_ids, strict=True)
                assert [own[token].logprob for own, token in found] == pytest.approx(
                    logprobs, abs=1e-4
                )
        scheduler = llm.engine.scheduler
        if way != "preempted":
            assert scheduler.encoder.num_encoded == 3 + len(mixed[1]), "each item once"
        assert (scheduler.stats().num_preemptions > 0) == (way == "preempted")
