"""Custom logits processors: loaded by name, given only their rows, failing only their requests."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from sampler_oracle import VOCAB, Case, make_request, make_rows, oracle, set_up

from penstock.protocol.errors import ConfigError
from penstock.protocol.step import NewRequest
from penstock.runner.logits_processors import LogitsProcessor, ProcessorRows, load_processors

pytestmark = pytest.mark.usefixtures("implementation")


class Force(LogitsProcessor):
    """Forces the token given as extra_args["force"]; a negative one raises."""

    def __init__(self) -> None:
        self.target: dict[int, int] = {}
        self.seen: list[list[int]] = []

    def add(self, slot: int, request: NewRequest) -> bool:
        arguments = request.params.extra_args or {}
        if "refuse" in arguments:
            raise ValueError("refused")
        if "force" not in arguments:
            return False
        self.target[slot] = arguments["force"]
        return True

    def remove(self, slot: int) -> None:
        del self.target[slot]

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        self.seen.append(rows.host_slots.tolist())
        assert rows.token_ids is None
        for row, slot in enumerate(rows.host_slots):
            logits[row] -= 1000.0  # in place, and before it may raise
            if self.target[slot] < 0:
                raise RuntimeError("cannot force this")
            logits[row, self.target[slot]] += 2000.0
        return logits


class RepeatLast(LogitsProcessor):
    """Always the token before; needs the tokens on the host."""

    needs_tokens: ClassVar[bool] = True

    def __init__(self) -> None:
        self.histories: list[list[int]] = []

    def add(self, slot: int, request: NewRequest) -> bool:
        return bool(request.params.extra_args)

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        assert rows.token_ids is not None
        self.histories = rows.token_ids
        forced = torch.full_like(logits, -50.0)
        for row, tokens in enumerate(rows.token_ids):
            forced[row, tokens[-1]] = 50.0
        return forced


class BadShape(LogitsProcessor):
    def add(self, slot: int, request: NewRequest) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        return logits[:, :-1]


class ReturnsNothing(LogitsProcessor):
    def add(self, slot: int, request: NewRequest) -> bool:
        return None  # type: ignore[return-value]

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        return logits


class NeedsAnArgument(LogitsProcessor):
    def __init__(self, argument: int) -> None: ...

    def add(self, slot: int, request: NewRequest) -> bool:
        return False

    def apply(self, logits: torch.Tensor, rows: ProcessorRows) -> torch.Tensor:
        return logits


def case(index: int, **extra: int) -> Case:
    random = np.random.default_rng(index)
    tokens = random.integers(0, VOCAB, size=10).tolist()
    logits = random.standard_normal(VOCAB).astype(np.float32)
    request = make_request(tokens[:4], seed=index, extra_args=dict(extra) or None)
    return Case(request, tokens, 6, logits)


def test_only_requests_that_ask_for_a_processor_are_handed_to_it() -> None:
    processor = Force()
    cases = [case(0), case(1, force=9), case(2), case(3, force=30)]
    sampler, logits, rows = set_up(cases, processors=(processor,))
    result = sampler.sample(logits, rows)
    assert result.token_ids.tolist() == [oracle(cases[0]), 9, oracle(cases[2]), 30]
    assert processor.seen == [[1, 3]]
    for slot in range(4):
        sampler.remove(slot)
    assert processor.target == {}


def test_a_processor_that_raises_fails_only_the_rows_it_raises_for() -> None:
    cases = [case(0), case(1, force=9), case(2, force=-1), case(3, force=30)]
    sampler, logits, rows = set_up(cases, processors=(Force(),))
    result = sampler.sample(logits, rows)
    assert result.faulted.tolist() == [False, False, True, False]
    assert result.token_ids.tolist() == [oracle(cases[0]), 9, 0, 30]
    assert list(result.errors) == [2]
    assert result.errors[2] == "logits processor Force failed: RuntimeError('cannot force this')"


def test_errors_name_the_row_where_plain_greedy_rows_stand_before_it() -> None:
    plain = case(0)
    plain.request = make_request(plain.request.token_ids, temperature=0.0)
    sampler, logits, rows = set_up([plain, case(1, force=-1)], processors=(Force(),))
    result = sampler.sample(logits, rows)
    assert list(result.errors) == [1]
    assert result.faulted.tolist() == [False, True]


def test_a_request_that_a_processor_refuses_fails_alone() -> None:
    cases = [case(0), case(1, refuse=1)]
    sampler, logits, rows = set_up(cases, processors=(Force(),))
    result = sampler.sample(logits, rows)
    assert result.faulted.tolist() == [False, True]
    assert "refused" in result.errors[1]
    sampler.remove(1)
    sampler.add(1, cases[0].request)
    assert not sampler.sample(logits, rows).faulted.any()


@pytest.mark.parametrize(
    ("processor", "message"),
    [(BadShape(), "apply must return a tensor"), (ReturnsNothing(), "add must return True or")],
)
def test_a_processor_that_breaks_its_contract_fails_its_requests_with_the_reason(
    processor: LogitsProcessor, message: str
) -> None:
    sampler, logits, rows = set_up([case(0)], processors=(processor,))
    result = sampler.sample(logits, rows)
    assert result.faulted.tolist() == [True]
    assert message in result.errors[0]


def test_a_processor_that_needs_tokens_gets_the_history_of_each_row() -> None:
    processor = RepeatLast()
    cases = [case(0, on=1), case(1), case(2, on=1)]
    sampler, logits, _ = set_up(cases, processors=(processor,))
    rows = make_rows([0, 1, 2], [5, 6, 8])
    result = sampler.sample(logits, rows)
    assert processor.histories == [cases[0].tokens[:5], cases[2].tokens[:8]]
    assert result.token_ids[[0, 2]].tolist() == [cases[0].tokens[4], cases[2].tokens[7]]


def test_processors_run_in_the_order_given() -> None:
    sampler, logits, rows = set_up([case(0, force=9)], processors=(RepeatLast(), Force()))
    assert sampler.sample(logits, rows).token_ids.tolist() == [9]


def test_processors_are_loaded_from_names_and_classes() -> None:
    loaded = load_processors([f"{__name__}:Force", RepeatLast])
    assert [type(processor).__name__ for processor in loaded] == ["Force", "RepeatLast"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", 'must be "module:Class", got "no_colon"'),
        ("no.such.module:Class", "cannot import no.such.module"),
        ("math:Missing", "math has no Missing"),
        ("math:pi", "must be a subclass of"),
        (int, "must be a subclass of"),
        (NeedsAnArgument, "cannot be constructed"),
    ],
)
def test_a_processor_that_cannot_be_loaded_is_a_configuration_error(
    spec: str | type, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_processors([spec])
