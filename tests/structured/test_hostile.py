"""Schemas, expressions and grammars that are too much cost their sender an error, soon."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from byte_model import open_llm

from penstock import SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.protocol.errors import InputError, PenstockError
from penstock.structured import checker as checker_module
from penstock.structured.checker import Checker
from penstock.structured.vocabulary import Vocabulary

TIMEOUT_S = 1.0
SPARE_S = 4.0  # for a busy machine


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


# Refused, for what they are or for what they take.
REFUSED: dict[str, dict[str, Any]] = {
    "deep schema": {"json": nested(20_000)},
    "deep expression": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "deep grammar": {"grammar": "start: " + "(" * 5_000 + '"a"' + ")" * 5_000},
    "refers to itself": {"json": {"$ref": "#"}},
    "refers in a circle": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "multiplies into itself": {"json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "huge multiples": {
        "json": {"type": "integer", "multipleOf": 123456789, "minimum": 0, "maximum": 10**15}
    },
    "thousands of properties": {
        "json": {"properties": {f"p{i}": {"type": "integer"} for i in range(9000)}}
    },
    "a product of alternatives": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    },
    "fetched from elsewhere": {"json": {"$ref": "http://localhost/schema.json"}},
    "never": {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
}  # fmt: skip
# Compiled in no time: automata are made as the output needs them.
HARMLESS: dict[str, dict[str, Any]] = {
    "a giant enumeration": {"json": {"enum": [f"value{i}" for i in range(10_000)]}},
    "a language without words": {"grammar": 'start: "a" start'},
    "large bounds": {"regex": "a{1,1000000}"},
    "bounds in bounds": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "catastrophic for backtracking": {"regex": "(a+)+b"},
    "many states": {"regex": ".*a.{200}"},
    "large lengths": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "large counts": {"json": {"type": "array", "items": {"type": "null"}, "minItems": 10**9}},
}


@pytest.fixture(scope="module")
def checker(vocabulary: Vocabulary) -> Iterator[Checker]:
    checker = Checker("llguidance", vocabulary, TIMEOUT_S)
    yield checker
    checker.close()


def warm(checker: Checker) -> None:
    checker.check(Structured(regex="a"))  # a process that was killed is started again


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused_in_time(checker: Checker, name: str) -> None:
    params = Structured(**REFUSED[name])
    warm(checker)
    started = time.perf_counter()
    with pytest.raises(InputError, match="structured_outputs") as caught:
        checker.check(params)
    assert time.perf_counter() - started < TIMEOUT_S + SPARE_S
    assert len(str(caught.value)) < 1000
    warm(checker)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_dangerous_is_taken(checker: Checker, name: str) -> None:
    warm(checker)
    assert checker.check(Structured(**HARMLESS[name]))


def test_memory_is_limited(vocabulary: Vocabulary) -> None:
    """The process may take 1 GiB; what would take more ends it, and nothing else."""
    greedy = Checker("llguidance", vocabulary, 60.0)
    try:
        warm(greedy)
        assert greedy._process is not None
        proc = Path(f"/proc/{greedy._process.pid}")
        limits = (proc / "limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
        size = int((proc / "statm").read_text().split()[0]) * resource.getpagesize()
        assert size < int(line.split()[3]) <= size + checker_module.MEMORY_LIMIT
        greedy._process.kill()  # as the kernel would, or as the library does without memory
        with pytest.raises(InputError, match="more memory than the 1024 MiB"):
            greedy.check(Structured(regex="b"))
        warm(greedy)
    finally:
        greedy.close()


def test_checking_ends_at_once_when_the_engine_is_closed(vocabulary: Vocabulary) -> None:
    slow = Structured(**REFUSED["a product of alternatives"])
    for _ in range(3):
        checker = Checker("llguidance", vocabulary, 600.0)
        warm(checker)
        process = checker._process
        assert process is not None
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(checker.check, slow)
            while not checker._in_use.locked():
                assert not answer.done()
            checker.end()  # beside a thread that waits for the answer
            with pytest.raises(PenstockError, match="the engine is closed"):
                answer.result(timeout=60.0)
        assert process.poll() is not None
        with pytest.raises(PenstockError, match="closed"):
            checker.check(slow)


def test_an_engine_refuses_it_and_goes_on(byte_model: str) -> None:
    """Others get their tokens meanwhile, and the same thing again is refused at once."""
    with open_llm(byte_model, structured_outputs_timeout_s=TIMEOUT_S) as llm:
        spec = Structured(regex="a+")
        fine = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=spec)
        bad = SamplingParams(structured_outputs=Structured(**REFUSED["huge multiples"]))
        (before,) = llm.generate("x", fine, use_tqdm=False)
        outputs = llm.generate(["x", "x"], [bad, fine], use_tqdm=False)
        assert "takes more than 1 s to compile" in outputs[0].error
        assert outputs[0].error_field == "structured_outputs"
        assert outputs[1].outputs[0].text == before.outputs[0].text
        started = time.perf_counter()
        (again,) = llm.generate("x", bad, use_tqdm=False)
        assert again.error == outputs[0].error
        assert time.perf_counter() - started < TIMEOUT_S / 2


def test_masks_that_take_too_long_fail_their_request_alone(
    byte_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.structured import manager

    monkeypatch.setattr(manager, "STEP_LIMIT_S", 0.3)
    with open_llm(byte_model) as llm:
        backend, _ = llm.engine.grammars._backend()
        fill = backend.fill
        slow_matchers: set[int] = set()

        def fill_slowly(matchers: Any, bits: Any) -> None:
            fill(matchers, bits)
            if any(id(matcher) in slow_matchers for matcher in matchers):
                time.sleep(0.4)

        monkeypatch.setattr(backend, "fill", fill_slowly)
        params = SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs=Structured(regex="[0-9]{20}")
        )
        requests = [llm.frontend.prepare(name, "x", params) for name in ("good", "bad")]
        llm._submit(requests)
        while "bad" not in llm.engine.grammars._outputs:
            llm._step()
        slow_matchers.add(id(llm.engine.grammars._outputs["bad"].matcher))
        while llm.engine.has_work():
            llm._step()
        good, bad = (request.assembler.take() for request in requests)
        assert good is not None
        assert good.error is None
        assert len(good.outputs[0].text) == 20
        assert bad is not None
        assert "too complex: one token took" in str(bad.error)
