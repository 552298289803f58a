"""A GGUF model with its vision tower gives the tokens of the checkpoint it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_vision_files import VISION_TWINS, is_text, write_files
from safetensors.numpy import load_file, save_file
from tiny_vision import InProcessMedia, Reference, clip, make_vision_checkpoint, picture

from penstock import LLM, SamplingParams
from penstock.loading.gguf.towers import TOWERS
from penstock.protocol.errors import InputError

SLOW = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 200}
OPTIONS |= {"dtype": "float32", "kv_cache_dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
SHAPES = ((100, 60), (40, 90), (200, 30))  # width and height


def prompts(image: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"prompt": f"<|user|>{image}Say<|assistant|>", "images": [picture(*shape)]}
        for shape in SHAPES
    ]
    two = f"<|user|>What is {image}?<|assistant|>A cat.<|user|>and {image} here<|assistant|>"
    found.append({"prompt": two, "images": [picture(100, 60), picture(50, 50, 3)]})
    return found


def open_model(path: Path, **options: Any) -> LLM:
    llm = LLM(str(path), **OPTIONS, **options)
    media = llm.frontend.media
    if media is not None:
        media.pool = InProcessMedia(media.pool._make_setup())
    return llm


def generate(llm: LLM, given: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The prompt's tokens, the tokens after it, and their logprobs."""
    asked = [
        {"prompt": each["prompt"], "multi_modal_data": {"image": each["images"]}} for each in given
    ]
    found = []
    for output in llm.generate(asked, GREEDY, use_tqdm=False):
        (completion,) = output.outputs
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        logprobs = [own[token].logprob for own, token in pairs]
        found.append((output.prompt_token_ids, completion.token_ids, logprobs))
    return found


def round_tower(checkpoint: Path, type_name: str) -> None:
    """Round matrices to the numbers that a GGUF type has, of at least all that are stored so."""
    kind = gguf.GGMLQuantizationType[type_name]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if not is_text(name) and tensor.ndim == 2 and tensor.shape[1] % block == 0:
            blocks = gguf.quants.quantize(np.ascontiguousarray(tensor), kind)
            tensors[name] = gguf.quants.dequantize(blocks, kind).reshape(tensor.shape)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


TYPES = {"gemma3": "F16", "mistral3": "Q8_0", "qwen3_vl": "Q8_0"}  # of towers; F32 for others
QUICK = (*TYPES, "idefics3", "qwen2_5_vl")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else SLOW) for each in VISION_TWINS]
)
def test_a_gguf_model_with_its_tower_gives_the_tokens_of_its_checkpoint(
    name: str, tmp_path: Path
) -> None:
    checkpoint = make_vision_checkpoint(tmp_path, name)
    stored = TYPES.get(name, "F32")
    round_tower(checkpoint, stored)
    reference = Reference(checkpoint, name)
    given = prompts(reference.variant.image)
    path = write_files(tmp_path / "gguf", checkpoint, VISION_TWINS[name], stored)
    with open_model(path) as llm:
        found = generate(llm, given)
    for (prompt_ids, token_ids, logprobs), each in zip(found, given, strict=True):
        expected = reference.generate_scored(*each.values(), 8)
        assert prompt_ids == expected[0]
        assert token_ids == expected[1]
        assert logprobs == pytest.approx(expected[2], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_video_gives_the_tokens_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(tmp_path, name)
    reference = Reference(checkpoint, name)
    path = write_files(tmp_path / "gguf", checkpoint, VISION_TWINS[name])
    text, frames = f"<|user|>{reference.variant.video}Say<|assistant|>", clip(100, 60, 5)
    facts = {"fps": 2.0, "frames_indices": [0, 9, 17, 26, 40], "total_num_frames": 41}
    asked = {"prompt": text, "multi_modal_data": {"video": [(frames, facts)]}}
    with open_model(path) as llm:
        (output,) = llm.generate([asked], GREEDY, use_tqdm=False)
    expected = reference.generate_scored(text, [], 8, (frames, facts))
    assert output.prompt_token_ids == expected[0]
    assert output.outputs[0].token_ids == expected[1]


@pytest.mark.slow
def test_a_chat_with_an_image_runs_in_media_processes(tmp_path: Path) -> None:
    """In every way that a model is named, and on text alone."""
    checkpoint = make_vision_checkpoint(tmp_path, "gemma3")
    path = write_files(tmp_path / "gguf", checkpoint, VISION_TWINS["gemma3"])
    tower = path.with_name("mmproj-F32.gguf").rename(tmp_path / "tower.gguf")
    parts = [{"type": "image_pil", "image_pil": picture(90, 50)}, {"type": "text", "text": "Say"}]
    found = []
    for options in ({"mmproj": str(tower)}, {"mmproj": str(tower), "cpu_backend": "torch"}):
        with LLM(str(path), **OPTIONS, **options) as llm:
            (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
    with LLM(str(path), **OPTIONS) as llm, pytest.raises(InputError, match="takes text only"):
        llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)


def test_every_kind_of_tower_is_compared() -> None:
    assert {twin.projector for twin in VISION_TWINS.values()} == TOWERS.keys()
    for twin in VISION_TWINS.values():
        assert twin.text.architecture in TOWERS[twin.projector].classes
