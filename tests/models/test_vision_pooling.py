"""Vision-language models that pool give transformers' vectors for prompts with images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import InProcessMedia, Reference, make_vision_checkpoint, picture
from vision_variants import VARIANTS

from penstock import LLM, PoolingParams
from penstock.protocol.errors import ConfigError, InputError
from penstock.text.scoring import QWEN3_VL_RERANKER

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200, "runner": "pooling",
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    name = request.param
    folder = make_vision_checkpoint(tmp_path_factory.mktemp(name), name)
    return folder, Reference(folder, name)


@torch.inference_mode()
def states(reference: Reference, text: str, images: list[Any]) -> np.ndarray[Any, Any]:
    """[tokens, hidden_size]"""
    if images or not reference.variant.needs_image:
        inputs = reference.processor(text=[text], images=images or None, return_tensors="pt")
    else:
        inputs = reference.processor.tokenizer([text], return_tensors="pt")
        inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    found = reference.model(**inputs, output_hidden_states=True).hidden_states
    return found[-1][0].float().numpy()  # after the last norm


def normalized(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def prompts(reference: Reference) -> list[tuple[str, list[Any]]]:
    image = reference.variant.image
    return [
        (f"<|user|>{image}Represent it.<|assistant|>", [picture(100, 60)]),
        ("<|user|>a text alone<|assistant|>", []),
        (f"<|user|>{image} or {image}<|assistant|>", [picture(100, 60), picture(40, 90, 1)]),
    ]


def asked(text: str, images: list[Any]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images} if images else {}}


def open_llm(folder: Path, **options: Any) -> LLM:
    llm = LLM(str(folder), **{**OPTIONS, **options})
    assert llm.frontend.media is not None
    llm.frontend.media.pool = InProcessMedia(folder)  # type: ignore[assignment]
    return llm


def test_embeddings_equal_transformers_in_chunks_and_from_the_prefix_cache(
    model: tuple[Path, Reference],
) -> None:
    folder, reference = model
    given = prompts(reference)
    expected = [states(reference, *each) for each in given]
    chunks = max(16, reference.variant.max_span)
    with open_llm(folder, max_num_batched_tokens=chunks, max_num_seqs=4) as llm:
        for _ in range(2):
            found = llm.embed([asked(*each) for each in given], use_tqdm=False)
            for output, rows in zip(found, expected, strict=True):
                assert len(output.prompt_token_ids) == len(rows)
                np.testing.assert_allclose(
                    output.outputs.embedding, normalized(rows[-1]), atol=1e-5
                )
        raw = PoolingParams(task="token_embed", use_activation=False)
        (output,) = llm.encode(asked(*given[2]), raw, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, expected[2], atol=1e-4)
        assert llm.engine.scheduler.encoder.num_encoded == 2, "each image once"


def test_a_mean_includes_the_rows_of_images(model: tuple[Path, Reference]) -> None:
    folder, reference = model
    text, images = prompts(reference)[0]
    with open_llm(folder, pooler_config={"pooling_type": "MEAN"}) as llm:
        (output,) = llm.embed(asked(text, images), use_tqdm=False)
        mean = normalized(states(reference, text, images).mean(0))
        np.testing.assert_allclose(output.outputs.embedding, mean, atol=1e-5)
        with pytest.raises(InputError, match="truncate_prompt_tokens cannot be combined"):
            llm.embed(asked(text, images), truncate_prompt_tokens=5)
        with pytest.raises(InputError, match=r"must have one .* for each of its 1 images, got 0"):
            llm.embed(asked("no place for it", images))


def test_a_reranker_answers_a_pair_and_a_conversation_with_images(
    tmp_path: Path,
) -> None:
    """Tokens of one byte stand in for no and yes."""
    folder = tmp_path / "Qwen3-VL-Reranker-tiny"
    folder.mkdir()
    make_vision_checkpoint(folder, "qwen3_vl")
    reference = Reference(folder, "qwen3_vl")
    first, second = reference.processor.tokenizer.convert_tokens_to_ids(["a", "b"])

    def score(text: str, images: list[Any]) -> float:
        head = reference.model.lm_head.weight.detach().numpy()
        logits = states(reference, text, images)[-1] @ head.T
        return float(1 / (1 + np.exp(logits[first] - logits[second])))

    with pytest.raises(ConfigError, match="must name single tokens, but 'no' is 2 of them"):
        LLM(str(folder), dtype="float32")  # it is known by its name
    overrides = {
        "architectures": ["Qwen3VLForSequenceClassification"], "classifier_from_token": ["a", "b"],
    }  # fmt: skip
    with open_llm(folder, max_model_len=1024, hf_overrides=overrides) as llm:
        (pair,) = llm.score("cat", "a picture of it", instruction="Find it.", use_tqdm=False)
        text = QWEN3_VL_RERANKER.format(
            instruction="Find it.", query="cat", document="a picture of it"
        )
        assert pair.outputs.score == pytest.approx(score(text, []), abs=1e-5)
        text, images = prompts(reference)[0]
        (shown,) = llm.classify(asked(text, images), use_tqdm=False)
        assert shown.outputs.probs[0] == pytest.approx(score(text, images), abs=1e-5)


@pytest.mark.slow
def test_a_checkpoint_without_a_head_has_the_same_embeddings(
    model: tuple[Path, Reference], tmp_path: Path
) -> None:
    folder, reference = model
    if reference.variant.model != "Qwen3VLForConditionalGeneration":
        pytest.skip("others are saved with their heads")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    reference.model.model.save_pretrained(tmp_path)
    given = prompts(reference)[0]
    with open_llm(tmp_path) as llm:
        (output,) = llm.embed(asked(*given), use_tqdm=False)
        expected = normalized(states(reference, *given)[-1])
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
