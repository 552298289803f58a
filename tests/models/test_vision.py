"""Vision-language models give transformers' tokens, whatever else the engine does meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_vision import InProcessMedia, Reference, make_vision_checkpoint, picture
from vision_variants import VARIANTS

from penstock import LLM, SamplingParams
from penstock.models.architectures import VISION
from penstock.protocol.errors import ConfigError, InputError

SHAPES = ((100, 60), (40, 90), (64, 64), (200, 30), (30, 120))  # width and height
OPTIONS = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=VARIANTS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    name = request.param
    folder = make_vision_checkpoint(tmp_path_factory.mktemp(name), name)
    return folder, Reference(folder, name)


def prompts(reference: Reference) -> list[dict[str, Any]]:
    """One image of each shape, two images among text, and none."""
    image = reference.variant.image
    found: list[dict[str, Any]] = [
        {"prompt": f"<|user|>{image}Say<|assistant|>", "images": [picture(*shape)]}
        for shape in SHAPES
    ]
    two = f"<|user|>What is {image}?<|assistant|>A cat.<|user|>and {image} here<|assistant|>"
    found.append({"prompt": two, "images": [picture(100, 60), picture(50, 50, 3)]})
    found.append({"prompt": "<|user|>No image at all<|assistant|>", "images": []})
    return found


def asked(prompt: dict[str, Any]) -> dict[str, Any]:
    data = {"image": prompt["images"]} if prompt["images"] else {}
    return {"prompt": prompt["prompt"], "multi_modal_data": data}


SLOW = pytest.mark.slow
WAYS: dict[str, dict[str, Any]] = {  # options of the engine
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "encoder_cache_tokens": 96},
    "chunks of 64": {"max_num_batched_tokens": 64, "encoder_cache_tokens": 96},
    "whole prompts": {},
    "preempted": {"max_model_len": 256},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "chunks of 7" else SLOW) for way in WAYS]
)
def test_tokens_and_logprobs_equal_transformers(model: tuple[Path, Reference], way: str) -> None:
    """All prompts in one batch, and once more from the prefix cache."""
    folder, reference = model
    num_tokens = 24 if way == "preempted" else 8
    given = prompts(reference)
    expected = [reference.generate_scored(*each.values(), num_tokens) for each in given]
    options = {**OPTIONS, **WAYS[way]}
    if "max_num_batched_tokens" in options:
        options["max_num_batched_tokens"] = max(
            options["max_num_batched_tokens"], reference.variant.max_span
        )
    if way == "preempted":
        options["num_gpu_blocks_override"] = 18 * reference.variant.num_groups
    params = msgspec.structs.replace(GREEDY, max_tokens=num_tokens)
    with LLM(str(folder), **options) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)
        for _ in range(2):
            outputs = llm.generate([asked(each) for each in given], params, use_tqdm=False)
            for output, (prompt_ids, token_ids, logprobs) in zip(outputs, expected, strict=True):
                assert output.prompt_token_ids == prompt_ids
                (completion,) = output.outputs
                assert completion.token_ids == token_ids
                found = zip(completion.logprobs, token_ids, strict=True)
                assert [own[token].logprob for own, token in found] == pytest.approx(
                    logprobs, abs=1e-4
                )
        scheduler = llm.engine.scheduler
        if way == "whole prompts":
            assert scheduler.encoder.num_encoded == len(SHAPES) + 1, "each image once"
        assert (scheduler.stats().num_preemptions > 0) == (way == "preempted")


def test_a_step_that_cannot_hold_an_image_is_refused(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "gemma3")
    options = {**OPTIONS, "max_num_batched_tokens": 15, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least 16, got 15"):
        LLM(str(folder), **options)


def test_media_count_and_tower_off(model: tuple[Path, Reference]) -> None:
    folder, reference = model
    given = prompts(reference)
    with LLM(str(folder), **OPTIONS, language_model_only=True) as llm:
        assert not any(
            "vis" in name for name, _ in llm.engine.executor.worker.model.named_modules()
        )
        (output,) = llm.generate(given[-1]["prompt"], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == reference.generate(given[-1]["prompt"], [], 8)[1]
        with pytest.raises(InputError, match="takes text only"):
            llm.generate(asked(given[0]), GREEDY, use_tqdm=False)


def test_every_vision_model_is_compared() -> None:
    for name, known in VISION.items():
        assert known.parity, name
        assert set(known.parity) <= set(VARIANTS), name


def test_processor_options_of_a_call_apply_below_those_of_its_prompts(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "qwen2_vl")
    small = {"max_pixels": 28 * 28 * 4}
    prompt = asked(prompts(Reference(folder, "qwen2_vl"))[3])
    messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture(200, 30)}]}]
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)

        def length(prompt: dict[str, Any], **options: Any) -> int:
            (output,) = llm.generate(prompt, GREEDY, False, **options)
            return len(output.prompt_token_ids)

        own = {**prompt, "mm_processor_kwargs": small}
        assert length(prompt, mm_processor_kwargs=small) == length(own) < length(prompt)
        large = {"max_pixels": 28 * 28 * 100}
        assert length(own, mm_processor_kwargs=large) == length(own)
        with pytest.raises(InputError, match="mm_processor_kwargs must be a dictionary, got 5"):
            length(prompt, mm_processor_kwargs=5)
        (plain,) = llm.chat(messages, GREEDY, False)
        (fewer,) = llm.chat(messages, GREEDY, False, mm_processor_kwargs=small)
        assert len(fewer.prompt_token_ids) < len(plain.prompt_token_ids)
