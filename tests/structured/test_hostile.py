"""Schemas, expressions and grammars that are too much cost their sender an error, soon."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from byte_model import open_llm
from waiting import eventually

from penstock import SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.confined.process import ConfinedProcess, ProcessDied
from penstock.protocol.errors import InputError, RequestFault
from penstock.structured.backend import Grammar
from penstock.structured.compiler import MEMORY_LIMIT, Compilation, GrammarCompiler, TryAgain
from penstock.structured.vocabulary import Vocabulary
from penstock.text.tokenizer import Tokenizer

MakeCompiler = Callable[..., GrammarCompiler]
TIMEOUT_S = 1.0


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


@pytest.fixture
def make_compiler(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Iterator[MakeCompiler]:
    compilers: list[GrammarCompiler] = []

    def make(timeout_s: float = TIMEOUT_S, **limits: Any) -> GrammarCompiler:
        made = GrammarCompiler("llguidance", timeout_s, lambda: (vocabulary, tokenizer.encode))
        made.pool.limits = dataclasses.replace(made.pool.limits, **limits)
        compilers.append(made)
        return made

    yield make
    for compiler in compilers:
        compiler.close()


def compiled(compiler: GrammarCompiler, request_id: str = "one", **spec: Any) -> Grammar:
    return compiler.request(Structured(**spec), request_id, "").future.result()


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler("llguidance", TIMEOUT_S, lambda: (vocabulary, tokenizer.encode))
    yield made
    made.close()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InputError, match="structured_outputs") as caught:
        compiled(compiler, **REFUSED[name])
    assert len(str(caught.value)) < 1000
    assert compiled(compiler, regex="a").matcher()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_dangerous_is_taken(compiler: GrammarCompiler, name: str) -> None:
    assert compiled(compiler, **HARMLESS[name]).matcher()


def test_memory_is_limited(make_compiler: MakeCompiler) -> None:
    """A process may take 1 GiB beyond what it has before its first job."""
    compiler = make_compiler()
    compiled(compiler, regex="a")
    (pid,) = compiler.pool.pids()
    limits = Path(f"/proc/{pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    assert size < int(line.split()[3]) <= size + MEMORY_LIMIT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_good_schema_stays_good_when_the_process_that_tries_it_dies_or_stops(
    make_compiler: MakeCompiler, number: signal.Signals
) -> None:
    compiler = make_compiler(stall_s=3.0)
    compiled(compiler, regex="a")
    (pid,) = compiler.pool.pids()
    os.kill(pid, number)
    assert compiled(compiler, regex="b").matcher()
    assert compiled(compiler, regex="b").matcher()


def test_only_verdicts_are_remembered(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(timeout_s=0.3)

    def outcome(**spec: Any) -> Compilation:
        compilation = compiler.request(Structured(**spec), "one", "")
        assert compilation.future.exception() is not None
        return compilation

    wrong, endless = {"regex": "("}, REFUSED["huge multiples"]
    assert outcome(**wrong) is outcome(**wrong)
    first = outcome(**endless)
    assert "takes more than 0.3 s to compile" in str(first.future.exception())
    assert outcome(**endless) is not first


def test_a_schema_that_loses_its_process_twice_may_be_sent_again(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler()
    with monkeypatch.context() as patched:
        patched.setattr(ConfinedProcess, "ask", lambda process, job: process.kill() or lose())

        def lose() -> NoReturn:
            raise ProcessDied(-signal.SIGKILL)

        with pytest.raises(TryAgain, match="could not be checked"):
            compiled(compiler, regex="a")
    assert compiled(compiler, regex="a").matcher()


def test_the_last_request_that_leaves_ends_a_compilation(make_compiler: MakeCompiler) -> None:
    compiler = make_compiler(timeout_s=600.0)
    slow = Structured(**REFUSED["huge multiples"])
    first = compiler.request(slow, "one", "")
    assert compiler.request(slow, "two", "") is first
    compiler.leave("one", first)
    assert compiler.request(slow, "three", "") is first
    assert compiled(compiler, regex="a").matcher()  # so that a process is busy with the other
    pids = compiler.pool.pids()
    compiler.leave("two", first)
    compiler.leave("three", first)
    eventually(lambda: len(set(pids) & set(compiler.pool.pids())) < len(pids))
    again = compiler.request(slow, "four", "")
    assert again is not first
    compiler.leave("four", again)


def test_a_matcher_of_a_known_grammar_waits_for_no_compilation(
    make_compiler: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler(timeout_s=600.0)
    known = compiler.request(Structured(regex="a+"), "known", "")
    grammar = known.future.result()
    assert known.is_quick
    release = threading.Event()
    backend, _ = compiler.backend()
    compile_now = backend.compile

    def compile_late(lowered: str) -> Grammar:
        assert release.wait(60.0)
        return compile_now(lowered)

    monkeypatch.setattr(backend, "compile", compile_late)
    others = [compiler.request(Structured(regex=f"b{{{i}}}"), str(i), "") for i in range(10)]
    try:
        assert compiler.in_thread(known, "", grammar.matcher).result(timeout=60.0)
        assert not any(other.future.done() for other in others)
    finally:
        release.set()
    assert all(other.future.result().matcher() for other in others)


def test_compilations_end_at_once_when_the_engine_is_closed(make_compiler: MakeCompiler) -> None:
    slow = Structured(**REFUSED["huge multiples"])
    for _ in range(3):
        compiler = make_compiler(timeout_s=600.0)
        compiled(compiler, regex="a")
        pending = compiler.request(slow, "slow", "")
        pids = compiler.pool.pids()
        compiler.close()
        with pytest.raises(RequestFault, match="the engine is closed"):
            pending.future.result(timeout=60.0)
        eventually(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_an_engine_refuses_it_and_goes_on(byte_model: str) -> None:
    """Others get their tokens meanwhile, and the same thing again is refused again."""
    with open_llm(byte_model, structured_outputs_timeout_s=TIMEOUT_S) as llm:
        spec = Structured(regex="a+")
        fine = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=spec)
        bad = SamplingParams(structured_outputs=Structured(**REFUSED["huge multiples"]))
        (before,) = llm.generate("x", fine, use_tqdm=False)
        outputs = llm.generate(["x", "x"], [bad, fine], use_tqdm=False)
        assert "takes more than 1 s to compile" in outputs[0].error
        assert outputs[0].error_field == "structured_outputs"
        assert outputs[1].outputs[0].text == before.outputs[0].text
        (again,) = llm.generate("x", bad, use_tqdm=False)
        assert again.error == outputs[0].error


def test_masks_that_take_too_long_fail_their_request_alone(
    byte_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.structured import manager

    monkeypatch.setattr(manager, "STEP_LIMIT_S", 0.3)
    with open_llm(byte_model) as llm:
        backend, _ = llm.engine.grammars.compiler.backend()
        fill = backend.fill
        slow_matchers: set[int] = set()

        def fill_slowly(matchers: Any, bits: Any) -> None:
            fill(matchers, bits)
            if any(id(matcher) in slow_matchers for matcher in matchers):
                end = time.process_time() + 0.4
                while time.process_time() < end:
                    pass

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
        assert bad.error_field == "structured_outputs"  # the client's to mend, not the server's
