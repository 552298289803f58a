"""Adapters of the language model apply to prompts with images, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import make_adapter
from tiny_vision import InProcessMedia, Reference, make_vision_checkpoint, picture

from penstock import LLM, SamplingParams
from penstock.protocol.adapter import LoRARequest

TARGETS = r".*language_model.*(q|v|down)_proj"
OPTIONS = {"dtype": "float32", "max_model_len": 512, "enable_lora": True}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["internvl", "mistral3", "pixtral", "llama4", "glm4v_moe"])
def test_the_tokens_are_those_of_merged_weights(name: str, ranks: int, tmp_path: Path) -> None:
    import peft

    folder = tmp_path / "model"
    folder.mkdir()
    make_vision_checkpoint(folder, name)
    adapter = make_adapter(
        tmp_path / "adapter", folder, auto="AutoModelForImageTextToText", target_modules=TARGETS
    )
    reference = Reference(folder, name)
    text, images = f"<|user|>{reference.variant.image}Say<|assistant|>", [picture(100, 60)]
    _, base = reference.generate(text, images, 8)
    reference.model = peft.PeftModel.from_pretrained(reference.model, adapter).merge_and_unload()
    _, expected = reference.generate(text, images, 8)
    assert expected != base
    asked = {"prompt": text, "multi_modal_data": {"image": images}}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **OPTIONS, tensor_parallel_size=ranks) as llm:
        assert llm.frontend.media is not None
        llm.frontend.media.pool = InProcessMedia(folder)
        request = LoRARequest("adapter", 1, str(adapter))
        for lora, tokens in ((request, expected), (None, base)):
            (output,) = llm.generate([asked], params, use_tqdm=False, lora_request=lora)
            assert output.outputs[0].token_ids == tokens
