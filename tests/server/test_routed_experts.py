"""What a model with experts says of them over HTTP."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from server_process import DUMMY, ServerProcess, events, make_tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = make_tiny_model(tmp_path_factory.mktemp("experts"))
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    with ServerProcess(str(model), *DUMMY, "--enable-return-routed-experts") as process:
        yield process


def decode(text: str) -> npt.NDArray[np.int16]:
    ids: npt.NDArray[np.int16] = np.load(io.BytesIO(base64.b64decode(text)))
    return ids


def test_a_completion_carries_them_and_a_stream_at_its_end(server: ServerProcess) -> None:
    body = {"prompt": "abcdef", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    ids = decode(choice["routed_experts"])
    assert ids.shape == (6 + 5 - 1, 2, 2)
    assert ((ids >= 0) & (ids < 6)).all()
    *pieces, done = events(server.post("/v1/completions", {**body, "stream": True}).text)
    assert done == "[DONE]"
    choices = [piece["choices"][0] for piece in pieces]
    assert all("routed_experts" not in choice for choice in choices[:-1])
    assert (decode(choices[-1]["routed_experts"]) == ids).all()


def test_a_chat_carries_them(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    reply = server.post("/v1/chat/completions", body).json()
    ids = decode(reply["choices"][0]["routed_experts"])
    assert len(ids) == reply["usage"]["total_tokens"] - 1
