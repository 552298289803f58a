"""Dual encoders give transformers' vectors, for texts and images in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_dual_encoders import VARIANTS, Reference, make_dual_encoder
from tiny_vision import InProcessMedia, picture

from penstock import LLM
from penstock.models.architectures import DUAL_ENCODERS
from penstock.protocol.errors import ConfigError, InputError

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4}
TEXTS = ["a", "A photo of a Cat", "a photo of a dog", "ae" * 15]
IMAGES = [picture(100, 60), picture(40, 90, 1), picture(56, 56, 2)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("clip_old", "siglip2") else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(folder, request.param, make_dual_encoder(folder, request.param))


def open_llm(folder: Path, **options: Any) -> LLM:
    llm = LLM(str(folder), **{**OPTIONS, **options})
    if llm.frontend.media is not None:
        llm.frontend.media.pool = InProcessMedia(folder)  # type: ignore[assignment]
    return llm


def of_image(image: Any, prompt: str = "") -> dict[str, Any]:
    return {"prompt": prompt, "multi_modal_data": {"image": image}}


@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_vectors_of_texts_and_images_equal_transformers(
    model: tuple[Path, Reference], backend: str
) -> None:
    folder, reference = model
    mixed = [TEXTS[0], *map(of_image, IMAGES), *TEXTS[1:]]
    texts = list(map(reference.text, TEXTS))
    expected = [texts[0], *map(reference.image, IMAGES), *texts[1:]]
    with open_llm(folder, cpu_backend=backend) as llm:
        for _ in range(2):
            found = llm.embed(mixed, use_tqdm=False)
            for output, vector in zip(found, expected, strict=True):
                np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)
        alone = llm.embed(mixed[1], use_tqdm=False)[0].outputs.embedding
        np.testing.assert_allclose(alone, expected[1], atol=1e-5)
        assert llm.engine.scheduler.encoder.num_encoded == len(IMAGES), "each image once"


def test_the_vector_of_tokens_is_that_of_the_first_end_token(
    model: tuple[Path, Reference],
) -> None:
    """The rest does not count. In old checkpoints of CLIP, the largest token is the end."""
    folder, reference = model
    given = [[0, 9, 9, 1, 70, 1], [0, 5, 255, 8, 255, 1], [0, 7, 1, 1, 1]]
    if reference.pads:
        given = [[*ids, *[2] * (32 - len(ids))] for ids in given]
    with open_llm(folder) as llm:
        found = llm.embed([{"prompt_token_ids": ids} for ids in given], use_tqdm=False)
        for output, ids in zip(found, given, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, reference.text(ids), atol=1e-5)


def test_a_text_beside_an_image_is_refused(model: tuple[Path, Reference]) -> None:
    folder, reference = model
    with open_llm(folder) as llm:
        with pytest.raises(InputError, match="a text or one image, got an image and a text"):
            llm.embed(of_image(IMAGES[0], "what is it?"))
        with pytest.raises(InputError, match="a text or one image, got 2 images"):
            llm.embed(of_image(IMAGES[:2]))
        with pytest.raises(InputError, match="takes images only"):
            llm.embed({"prompt": "", "multi_modal_data": {"video": b"no"}})
        with pytest.raises(InputError, match="at least one token, got none"):
            llm.embed({"prompt_token_ids": []})
        with pytest.raises(InputError, match="33"):
            llm.embed("a" * 31)
        (cut,) = llm.embed("a" * 50, truncate_prompt_tokens=-1, use_tqdm=False)
        np.testing.assert_allclose(cut.outputs.embedding, reference.text("a" * 30), atol=1e-5)
        if not reference.pads and reference.model.config.text_config.eos_token_id == 1:
            with pytest.raises(InputError, match="must contain the token that ends a text, 1"):
                llm.embed({"prompt_token_ids": [0, 5, 6]})


def test_without_the_vision_tower_texts_have_the_same_vectors(
    model: tuple[Path, Reference],
) -> None:
    folder, reference = model
    with open_llm(folder, language_model_only=True) as llm:
        (output,) = llm.embed(TEXTS[1], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, reference.text(TEXTS[1]), atol=1e-5)
        with pytest.raises(InputError, match="vision tower of this model is not loaded"):
            llm.embed(of_image(IMAGES[0]))


def test_a_dual_encoder_generates_nothing(model: tuple[Path, Reference]) -> None:
    with pytest.raises(ConfigError, match="no next token to generate"):
        LLM(str(model[0]), **OPTIONS, runner="generate")


def test_every_dual_encoder_is_compared() -> None:
    compared = {variant for known in DUAL_ENCODERS.values() for variant in known.parity}
    assert compared == set(VARIANTS)
