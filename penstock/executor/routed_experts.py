"""Joins the experts that pipeline stages report, each those of its own layers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.protocol.step import RequestResult, RoutedExperts, StepResult


def with_routed_experts(stages: Sequence[StepResult]) -> StepResult:
    """The last stage's result of a step, with what others report of its requests."""
    *earlier, last = stages
    if not any(stage.results for stage in earlier):
        return last  # it has all experts, or nobody asked
    reporting = [stage.results for stage in stages if stage.results]
    joined = [_join(own) for own in zip(*reporting, strict=True)]
    results = [
        msgspec.structs.replace(result, routed_experts=experts)
        for result, experts in zip(last.results, joined, strict=True)
    ]
    return msgspec.structs.replace(last, results=results)


def _join(stages: Sequence[RequestResult]) -> RoutedExperts:
    """Layers behind each other, padded with -1 where their tokens have fewer experts."""
    assert len({(own.request_id, own.incarnation) for own in stages}) == 1, "of one request"
    parts = [own.routed_experts for own in stages if own.routed_experts is not None]
    top_k = max(part.top_k for part in parts)
    ids = [
        np.pad(
            np.frombuffer(part.ids, np.int16).reshape(-1, part.num_layers, part.top_k),
            ((0, 0), (0, 0), (0, top_k - part.top_k)),
            constant_values=-1,
        )
        for part in parts
    ]
    joined = np.concatenate(ids, axis=1)
    return RoutedExperts(0, joined.shape[1], top_k, joined.tobytes())
