"""Adapters of the language model and of the vision tower apply to prompts with images."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import make_adapter
from tiny_vision import VARIANTS, InProcessMedia, Reference, make_vision_checkpoint, picture

from penstock import LLM, SamplingParams
from penstock.protocol.adapter import LoRARequest

LANGUAGE = r".*(language|text)_model.*(q|v|down)_proj"
OPTIONS = {"dtype": "float32", "max_model_len": 512, "enable_lora": True}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def asked(reference: Reference, *images: Any) -> dict[str, Any]:
    text = f"<|user|>{reference.variant.image * len(images)}Say<|assistant|>"
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


Scored = tuple[list[int], list[float]]  # tokens and their logprobs


def expected_of(reference: Reference, prompt: dict[str, Any]) -> Scored:
    images = prompt["multi_modal_data"]["image"]
    _, tokens, logprobs = reference.generate_scored(prompt["prompt"], images, 8)
    return tokens, logprobs


def merged(reference: Reference, adapter: Path, prompt: dict[str, Any]) -> Scored:
    """What the model gives with peft's merged weights. The reference keeps its own."""
    import peft

    model = reference.model
    reference.model = peft.PeftModel.from_pretrained(
        copy.deepcopy(model), adapter
    ).merge_and_unload()
    expected = expected_of(reference, prompt)
    reference.model = model
    return expected


def check(output: Any, expected: Scored) -> None:
    (completion,) = output.outputs
    assert completion.token_ids == expected[0]
    found = zip(completion.logprobs, completion.token_ids, strict=True)
    assert [own[token].logprob for own, token in found] == pytest.approx(expected[1], abs=1e-4)


def tower_layers(reference: Reference) -> list[str]:
    """All linear layers of the tower and its projector, and some of the language model."""
    return [
        name
        for name, layer in reference.model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
        if not re.search("(language|text)_model", name) or name.endswith("q_proj")
    ]


def make(folder: Path, model: Path, targets: str | list[str], seed: int = 0) -> Path:
    return make_adapter(
        folder, model, auto="AutoModelForImageTextToText", target_modules=targets, seed=seed
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["internvl", "mistral3", "pixtral", "llama4", "glm4v_moe"])
def test_the_tokens_are_those_of_merged_weights(name: str, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make_vision_checkpoint(folder, name)
    adapter = make(tmp_path / "adapter", folder, LANGUAGE)
    reference = Reference(folder, name)
    prompt = asked(reference, picture(100, 60))
    base = expected_of(reference, prompt)
    expected = merged(reference, adapter, prompt)
    assert expected[0] != base[0]
    with LLM(str(folder), **OPTIONS, tensor_parallel_size=ranks) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)
        request = LoRARequest("adapter", 1, str(adapter))
        for lora, scored in ((request, expected), (None, base)):
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=lora)
            check(output, scored)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen2_5_vl", 1),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in VARIANTS),
        pytest.param("qwen3_vl", 2, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_the_tower_give_the_tokens_of_merged_weights(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Two adapters of the tower, one of the language model and none, with the same images.

    There are fewer slots than adapters.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    make_vision_checkpoint(folder, name)
    reference = Reference(folder, name)
    prompt = asked(reference, picture(100, 60), picture(50, 50, 3))
    layers = tower_layers(reference)
    targets: list[Any] = [layers, layers, LANGUAGE]
    folders = [
        make(tmp_path / f"adapter{index}", folder, each, index)
        for index, each in enumerate(targets)
    ]
    images = prompt["multi_modal_data"]["image"]
    expected = [merged(reference, each, prompt) for each in folders]
    expected.append(expected_of(reference, prompt))
    assert len({round(logprobs[0], 3) for _, logprobs in expected}) == 4
    requests = [LoRARequest(each.name, index + 1, str(each)) for index, each in enumerate(folders)]
    with LLM(str(folder), **OPTIONS, max_loras=2, tensor_parallel_size=ranks) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)
        for _ in range(2):
            outputs = llm.generate(
                [prompt] * 4, GREEDY, use_tqdm=False, lora_request=[*requests, None]
            )
            for output, scored in zip(outputs, expected, strict=True):
                check(output, scored)
        num_encoded = llm.engine.scheduler.encoder.num_encoded
        assert num_encoded == 3 * len(images), "the last two share the tower's embeddings"
