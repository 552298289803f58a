"""A batch file's lines may have images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from tiny_vision import Reference, make_vision_checkpoint, picture

from penstock.cli.main import main


@pytest.mark.slow
def test_a_line_with_an_image_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Beside one whose image is broken."""
    folder = tmp_path / "model"
    folder.mkdir()
    make_vision_checkpoint(folder, "qwen2_5_vl")
    image = picture(100, 60)
    file = io.BytesIO()
    image.save(file, "PNG")
    good = base64.b64encode(file.getvalue()).decode()
    lines = []
    for name, data in (("good", good), ("bad", good[:100])):
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "Say"},
        ]
        body = {
            "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = "/v1/chat/completions"
        lines.append({"custom_id": name, "method": "POST", "url": url, "body": body})
    given, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "100"]
    assert main(["run-batch", str(folder), "-i", str(given), "-o", str(results), *flags]) == 0
    found = {each["custom_id"]: each for each in map(json.loads, results.read_text().splitlines())}
    reference = Reference(folder, "qwen2_5_vl")
    prompt = f"<|user|>{reference.variant.image}Say<|assistant|>"
    _, expected = reference.generate(prompt, [image], 8)
    (choice,) = found["good"]["response"]["body"]["choices"]
    assert choice["token_ids"] == expected
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"].startswith("messages[0].content[0]")
