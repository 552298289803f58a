"""Embeddings of images over HTTP, in each API's form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
import torch
from hostile_media import data_url, saved
from server_process import ServerProcess
from tiny_dual_encoders import Reference as DualReference
from tiny_dual_encoders import make_dual_encoder
from tiny_vision import Reference, make_vision_checkpoint, picture

FLAGS = ("--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "tiny")
IMAGES = [picture(100, 60), picture(40, 90, 1)]
URLS = [data_url(saved(image, "PNG")) for image in IMAGES]
PARTS: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]


def text(given: str) -> dict[str, Any]:
    return {"type": "text", "text": given}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def embed(server: ServerProcess, path: str, **body: Any) -> list[np.ndarray[Any, Any]]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    key = "data" if path == "/pooling" else "embedding"
    return [np.array(item[key]) for item in answer.json()["data"]]


def refusal(server: ServerProcess, path: str, **body: Any) -> tuple[str, str]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def embedder(server: ServerProcess) -> cohere.ClientV2:
    return cohere.ClientV2("none", base_url=server.base_url)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = make_vision_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return folder, Reference(folder, "qwen3_vl")


@pytest.fixture(scope="module")
def server(model: tuple[Path, Reference]) -> Iterator[ServerProcess]:
    flags = ("--runner", "pooling", "--max-model-len", "512", "--num-gpu-blocks-override", "100")
    with ServerProcess(str(model[0]), *FLAGS, *flags) as process:
        yield process


@torch.inference_mode()
def expected(reference: Reference, prompt: str, images: list[Any]) -> np.ndarray[Any, Any]:
    place = reference.variant.image
    inputs = reference.processor(
        text=[prompt.replace("IMAGE", place)], images=images or None, return_tensors="pt"
    )
    states = reference.model(**inputs, output_hidden_states=True).hidden_states[-1]
    return torch.nn.functional.normalize(states[0, -1], dim=-1).numpy()


def test_messages_with_images_have_transformers_embedding(
    server: ServerProcess, model: tuple[Path, Reference]
) -> None:
    system = {"role": "system", "content": "Represent it."}
    messages = [system, *user(PARTS[0], text(" and "), PARTS[1])]
    prompt = "<|system|>Represent it.<|user|>IMAGE and IMAGE"
    asked = expected(model[1], f"{prompt}<|assistant|>", IMAGES)
    for path in ("/v1/embeddings", "/pooling"):
        (found,) = embed(server, path, messages=messages, add_generation_prompt=True)
        np.testing.assert_allclose(found, asked, atol=1e-5)
    # As vLLM's documentation asks Qwen3-VL-Embedding.
    begun = [*messages, {"role": "assistant", "content": [text("")]}]
    (found,) = embed(server, "/v1/embeddings", messages=begun, continue_final_message=True)
    np.testing.assert_allclose(found, asked, atol=1e-5)
    answer = server.post("/v1/embeddings", {"messages": messages, "input": None}).json()
    assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": 14, "video_tokens": 0}
    assert "prompt_tokens_details" not in server.post("/v1/embeddings", {"input": "a"}).text
    (plain,) = embed(server, "/v1/embeddings", messages=messages)
    np.testing.assert_allclose(plain, expected(model[1], prompt, IMAGES), atol=1e-5)


def test_coheres_client_embeds_images_and_inputs_of_both(
    server: ServerProcess, model: tuple[Path, Reference]
) -> None:
    client, reference = embedder(server), model[1]
    reply = client.embed(
        model="tiny", images=URLS, input_type="image", embedding_types=["float"]
    ).embeddings.float_
    for found, image in zip(reply or [], IMAGES, strict=True):
        asked = expected(reference, "<|user|>IMAGE<|assistant|>", [image])
        np.testing.assert_allclose(found, asked, atol=1e-5)
    inputs: Any = [{"content": [text("a "), PARTS[1]]}, {"content": [text("only words")]}]
    reply = client.embed(
        model="tiny", inputs=inputs, input_type="search_document", embedding_types=["float"]
    ).embeddings.float_
    prompts = ["<|user|>a IMAGE<|assistant|>", "<|user|>only words<|assistant|>"]
    for found, prompt, images in zip(reply or [], prompts, ([IMAGES[1]], []), strict=True):
        np.testing.assert_allclose(found, expected(reference, prompt, images), atol=1e-5)


def test_bad_images_are_refused_by_their_place(server: ServerProcess) -> None:
    broken = data_url(b"no image", "image/png")
    bad = {"type": "image_url", "image_url": {"url": broken}}
    message, field = refusal(server, "/v1/embeddings", messages=user(PARTS[0], bad))
    assert (field, "not an image" in message) == ("messages[0].content[1].image_url.url", True)
    body: dict[str, Any] = {"images": [URLS[0], broken]}
    assert refusal(server, "/v2/embed", **body)[1] == "images[1]"
    body = {"inputs": [{"content": [text("a"), bad]}]}
    assert refusal(server, "/v2/embed", **body)[1] == "inputs[0].content[1].image_url.url"
    body = {"inputs": [{"content": [{"type": "text"}]}]}
    assert refusal(server, "/v2/embed", **body)[1] == "inputs[0].content[0].text"
    body = {"messages": user(PARTS[0]), "truncate_prompt_tokens": 3}
    assert refusal(server, "/v1/embeddings", **body)[1] == "truncate_prompt_tokens"
    assert refusal(server, "/v2/embed", texts=["a"], inputs=[])[1] == "inputs"
    large = user(*[PARTS[0]] * 60)
    message, field = refusal(server, "/v1/embeddings", messages=large)
    assert (field, "a larger max_model_len" in message) == ("messages", True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["clip", "siglip"])
def test_dual_encoders_embed_a_text_or_an_image(tmp_path: Path, variant: str) -> None:
    reference = DualReference(tmp_path, variant, make_dual_encoder(tmp_path, variant))
    texts = [reference.text(each) for each in ("a cat", "a dog")]
    images = [reference.image(image) for image in IMAGES]
    with ServerProcess(str(tmp_path), *FLAGS) as server:
        found = embed(server, "/v1/embeddings", input=["a cat", "a dog"])
        np.testing.assert_allclose(found, np.stack(texts), atol=1e-5)
        for path in ("/v1/embeddings", "/pooling"):
            (found_image,) = embed(server, path, messages=user(PARTS[0]))
            np.testing.assert_allclose(found_image, images[0], atol=1e-5)
            (found_text,) = embed(server, path, messages=user(text("a cat")))
            np.testing.assert_allclose(found_text, texts[0], atol=1e-5)
        client: Any = embedder(server)
        asked: dict[str, Any] = {"model": "tiny", "embedding_types": ["float"]}
        reply = client.embed(images=URLS, input_type="image", **asked)
        np.testing.assert_allclose(reply.embeddings.float_, np.stack(images), atol=1e-5)
        mixed = [{"content": [PARTS[1]]}, {"content": [text("a dog")]}]
        reply = client.embed(inputs=mixed, input_type="search_query", **asked)
        np.testing.assert_allclose(
            reply.embeddings.float_, np.stack([images[1], texts[1]]), atol=1e-5
        )
        (score,) = server.post("/score", {"text_1": "a cat", "text_2": "a dog"}).json()["data"]
        assert score["score"] == pytest.approx(float(texts[0] @ texts[1]), abs=1e-5)
        both = user(PARTS[0], text("what is it?"))
        message, field = refusal(server, "/v1/embeddings", messages=both)
        assert (field, "a text or one image" in message) == ("messages", True)
        two: dict[str, Any] = {"inputs": [{"content": PARTS}]}
        message, field = refusal(server, "/v2/embed", **two)
        assert (field, "2 images" in message) == ("inputs", True)
        message, field = refusal(server, "/v1/embeddings", messages=user(text("")))
        assert (field, "got neither" in message) == ("messages", True)
        message, field = refusal(server, "/v1/embeddings", messages=user(text("a")) * 2)
        assert (field, "one message" in message) == ("messages", True)
