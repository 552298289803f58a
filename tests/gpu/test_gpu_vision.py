"""Vision-language models on a GPU: the CPU's tokens in float32, with graphs of steps and passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import tokens
from tiny_vision import InProcessMedia, make_vision_checkpoint, picture
from vision_variants import VARIANTS

from penstock import LLM, SamplingParams
from penstock.runner.encoder_graphs import EncoderGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# M-RoPE, windows, spans, features for later layers, tiles, patches of any number.
NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "internvl", "pixtral"]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**28, "cpu_threads": 1,
    "cpu_backend": "torch", "max_num_batched_tokens": 512,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SIZES = ((100, 60), (40, 90), (64, 64))
NUM_ROUNDS = 3  # with new images of the same sizes: passes are captured in the second one


def prompts(name: str, turn: int) -> list[Any]:
    """An image of each size, two among text, and none."""
    image = VARIANTS[name].image
    given: list[Any] = [
        {
            "prompt": f"<|user|>{image}Say",
            "multi_modal_data": {"image": picture(*size, seed=turn)},
        }
        for size in SIZES
    ]
    two = [picture(100, 60, seed=10 + turn), picture(50, 50, seed=20 + turn)]
    given.append({"prompt": f"{image} and {image} here", "multi_modal_data": {"image": two}})
    return [*given, "<|user|>No image at all"]


def generate(llm: LLM, folder: Path, name: str) -> list[list[int]]:
    """All prompts in one batch, then one by one."""
    assert llm.frontend.media is not None
    llm.frontend.media.pool = InProcessMedia(folder)
    found = []
    for turn in range(NUM_ROUNDS):
        given = prompts(name, turn)
        found += tokens(llm.generate(given, GREEDY, use_tqdm=False))
        found += tokens(llm.generate(prompts(name, turn + 100)[:1], GREEDY, use_tqdm=False))
    return found


def graphs_of(llm: LLM) -> EncoderGraphs:
    graphs = llm.engine.executor.runner.media.encoder._encode.__self__  # type: ignore[attr-defined]
    assert isinstance(graphs, EncoderGraphs)
    return graphs


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 40, "max_num_seqs": 8}]
)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_cpus(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Decode steps and passes run in graphs, if nothing forbids it."""
    folder = make_vision_checkpoint(tmp_path, name)
    with LLM(str(folder), **SETTINGS, device="cpu") as llm:
        expected = generate(llm, folder, name)
    with LLM(str(folder), **{**SETTINGS, **options}, device="cuda") as llm:
        assert generate(llm, folder, name) == expected
        is_eager = "enforce_eager" in options
        assert bool(graphs_of(llm)._captured) != is_eager
        assert bool(llm.engine.executor.runner.steps._captured) != is_eager  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3"])
def test_graphs_change_no_bit_of_an_embedding(name: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, name)
    with LLM(str(folder), **{**SETTINGS, "dtype": "bfloat16"}, device="cuda") as llm:
        graphs = graphs_of(llm)
        tower, found = graphs._tower, []
        given = tower.padded(tower.blank(24))
        generator = torch.Generator("cuda").manual_seed(3)
        given.pixels.normal_(generator=generator)
        with torch.inference_mode():
            for _ in range(3):
                found.append(graphs._run(given).clone())
    assert given.shape in graphs._captured
    assert all(torch.equal(rows, found[0]) for rows in found)


def test_the_kv_cache_leaves_room_for_the_largest_image(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "qwen2_vl")
    budgets = []
    settings = {key: value for key, value in SETTINGS.items() if "bytes" not in key}
    for num_tokens in (64, 65536):
        options = {**settings, "encoder_cache_tokens": num_tokens}
        with LLM(str(folder), **options, device="cuda", gpu_memory_utilization=0.5) as llm:
            budgets.append(llm.engine.executor.capabilities.kv_budget)
    kept = (65536 - 64) * 64 * 4  # and no less for a pass of so many rows
    assert budgets[0] - budgets[1] > kept
