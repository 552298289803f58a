"""The example in docs/speculation.md trains an EAGLE-3 head that the engine serves."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from eagle_heads import Plain
from safetensors.torch import load_file
from scripts import load_script
from tiny_engine import OPTIONS, open_llm
from worded_models import save_worded_model

from penstock import LLM


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/train_eagle3.py")


def prompts(count: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(256) for _ in range(8)]} for _ in range(count)]


@pytest.fixture(scope="module")
def recorder(example: ModuleType, tiny_llama: str) -> Any:
    recorder = example.Recorder()
    options = {"dtype": "float32", "enable_prefix_caching": False, "max_num_seqs": 3}
    with open_llm(tiny_llama, drafter=recorder, **options) as llm:
        outputs = example.generate(llm, prompts(6), 12)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    recorded = [text.token_ids for text in recorder.texts]
    assert sorted(recorded) == sorted(text[:-1] for text in texts)  # the last one is not computed
    return recorder


def test_states_are_recorded_as_transformers_computes_them(recorder: Any, tiny_llama: str) -> None:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    text = recorder.texts[0]
    with torch.inference_mode():
        result = target(torch.tensor([text.token_ids]), output_hidden_states=True)
    aux = torch.cat([result.hidden_states[index][0] for index in recorder.aux_layers], dim=-1)
    torch.testing.assert_close(torch.cat(text.aux), aux, rtol=1e-3, atol=1e-3)
    logits = torch.cat(text.states) @ recorder.output.T
    torch.testing.assert_close(logits, result.logits[0], rtol=1e-3, atol=1e-3)


def test_the_example_writes_a_head_that_is_served(
    example: ModuleType, recorder: Any, tiny_llama: str, tmp_path: Path
) -> None:
    vocabulary = example.choose_vocabulary(recorder.texts, 128, 256)
    head, losses = example.train(recorder, vocabulary, num_steps=60, batch_size=4, num_drafts=2)
    assert sum(losses[-5:]) < sum(losses[:5])
    example.save(head, tmp_path / "head", recorder, vocabulary, 2)
    options = {"model": tiny_llama, "dtype": "float32", **OPTIONS}
    shares = example.measure(tmp_path / "head", prompts(6), 12, 2, **options)
    assert len(shares) == 2
    assert 1 >= shares[0] >= shares[1] >= 0
    with open_llm(tmp_path / "head", dtype="float32") as llm:  # it names its verifier
        assert llm.engine.scheduler.limits.num_drafts == 2
        assert llm.engine.speculation_stats() is not None


def test_training_computes_what_the_engine_will(
    example: ModuleType, recorder: Any, tiny_llama: str, tmp_path: Path
) -> None:
    """The first draft of each row, and the next ones after true tokens."""
    vocabulary = example.choose_vocabulary(recorder.texts, 128, 256)
    head, _ = example.train(recorder, vocabulary, num_steps=5, batch_size=4, num_drafts=2)
    example.save(head, tmp_path / "head", recorder, vocabulary, 2)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
    plain = Plain(Path(tiny_llama), {names[name]: each for name, each in tensors.items()})
    text = recorder.texts[0]
    token_ids, aux = torch.tensor([text.token_ids]), torch.cat(text.aux)[None]
    with torch.inference_mode():
        logits = head(recorder.embedding[token_ids], aux, 3)
    combined = aux[0] @ tensors["fc.weight"].T
    shifted = torch.cat([torch.zeros_like(combined[:1]), combined[:-1]])
    embedded = recorder.embedding[token_ids[0]]
    for first in (0, 5, len(text.token_ids) - 2):
        before = shifted[: first + 1]
        for draft, row in enumerate(range(first, min(first + 3, len(text.token_ids)))):
            states, hidden = plain.compute(embedded[: row + 1], before)
            expected = states[-1] @ tensors["lm_head.weight"].T
            torch.testing.assert_close(logits[draft][0, row], expected, rtol=1e-3, atol=1e-3)
            before = torch.cat([before, hidden[-1:]])


def test_the_command_trains_for_a_model_of_ones_own(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = save_worded_model(tmp_path / "model")
    monkeypatch.setattr(example, "LLM", functools.partial(LLM, kv_cache_memory_bytes=16 << 20))
    sizes = {"prompts": 2, "max-tokens": 4, "vocabulary": 64, "steps": 2, "batch-size": 2}
    short = [f"--{name}={size}" for name, size in {**sizes, "drafts": 1, "threads": 1}.items()]
    folder = str(tmp_path / "head")
    monkeypatch.setattr(sys, "argv", ["train_eagle3.py", folder, f"--model={model}", *short])
    example.main()
    assert "tokens per step. Wrote the head to" in capsys.readouterr().out


@pytest.mark.slow
def test_a_head_for_the_default_model_is_right_now_and_then(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = ["--prompts", "32", "--max-tokens", "48", "--steps", "60", "--drafts", "2"]
    monkeypatch.setattr(sys, "argv", ["train_eagle3.py", str(tmp_path / "head"), *arguments])
    example.main()
    first = capsys.readouterr().out.split("accepted in ")[1].split("%")[0]
    assert int(first) >= 5
