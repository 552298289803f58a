"""Requests for the default model."""

from __future__ import annotations

from faults.streams import Body


def default_model_bodies(count: int) -> list[Body]:
    """Requests of every kind, all different."""
    kinds: list[Body] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "logprobs": 2},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 0.5, "n": 2, "max_tokens": 24},
        {"temperature": 0.9, "seed": 4, "stop": ["the", "\n\n"], "min_tokens": 20},
    ]
    subjects = ("a river", "an old clock", "the sea", "a lighthouse", "bread", "a map", "snow")
    return [
        {
            "prompt": f"{index}. A short story about {subjects[index % len(subjects)]}: ",
            "max_tokens": 48 + index,
            **kinds[index % len(kinds)],
        }
        for index in range(count)
    ]
