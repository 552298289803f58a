"""What tests ask a server with LoRA adapters: to generate, to load and unload, which there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from server_process import ServerProcess

ADMIN = {"Authorization": "Bearer admin-key"}
LORA = ("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "3", "--load-format", "dummy")
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], **GREEDY}
BATCH = {"messages": [CHAT["messages"], CHAT["messages"]], **GREEDY}
# A body for each route, and where the answer has its text.
APIS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "/v1/completions": ({"prompt": "Hello", **GREEDY}, lambda r: r["choices"][0]["text"]),
    "/v1/chat/completions": (CHAT, lambda r: r["choices"][0]["message"]["content"]),
    "/v1/chat/completions/batch": (BATCH, lambda r: r["choices"][1]["message"]["content"]),
    "/invocations": (CHAT, lambda r: r["choices"][0]["message"]["content"]),
    "/v1/messages": (CHAT, lambda r: r["content"][0]["text"]),
    "/v1/responses": (
        {"input": "Hello", "temperature": 0, "max_output_tokens": 6, "ignore_eos": True},
        lambda r: r["output"][0]["content"][0]["text"],
    ),
}


def say(server: ServerProcess, model: str, prompt: str = "Hello", **fields: Any) -> str:
    response = server.post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY} | fields)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text: str = response.json()["choices"][0]["text"]
    return text


def load(server: ServerProcess, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return server.post("/v1/load_lora_adapter", body, headers=ADMIN)


def unload(server: ServerProcess, name: str, **fields: Any) -> httpx.Response:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name, **fields}, headers=ADMIN)


def names(server: ServerProcess) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def error_of(response: httpx.Response, status: int = 400) -> tuple[str, str | None]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"]
