"""Kinds of sampling under which the same request must give the same tokens."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "everything": {
        "temperature": 0.7,
        "top_k": 30,
        "min_p": 0.01,
        "seed": 5,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 8,
        "stop_token_ids": [9, 10, 11],
        "logit_bias": {3: 2.0, 4: -50.0},
    },
}
