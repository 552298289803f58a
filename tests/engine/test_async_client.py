"""The client's bookkeeping, against an engine that says what the test wants it to say."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest
import zmq
from fake_engines import INFO, Bench, on_a_loop, seed_of

from penstock.config import EngineConfig, ServerConfig
from penstock.engine import messages
from penstock.engine.handle import Death, EngineHandle, HangWatch
from penstock.engine.ledger import DeltaStream
from penstock.engine.messages import Outputs
from penstock.engine.supervisor import RestartDecision, Supervisor
from penstock.protocol.delta import EngineDelta, FinishReason
from penstock.protocol.errors import CrashFault, EngineDeadError


async def ends_of(stream: DeltaStream) -> list[EngineDelta]:
    return [delta async for deltas in stream for delta in deltas if delta.finish_reason]


@on_a_loop
async def test_requests_go_on_after_the_tokens_they_have() -> None:
    bench = Bench()
    bench.submit("a", "b")
    bench.submit("c")
    bench.engine.take()
    bench.say("a", 5, 6)
    bench.say("b", 7)
    bench.say("b", 8, finish_reason=FinishReason.STOP)
    bench.die()
    assert not bench.client.is_healthy
    bench.submit("d")  # waits
    assert bench.engine.take() == []
    assert bench.revive() == [("add", "a", [5, 6]), ("add", "c", []), ("add", "d", [])]
    assert bench.told.count("on_restart") == 1
    assert bench.told.count("on_replay") == 2  # d was never on the engine that died
    bench.say("a", 9)
    bench.die()
    assert bench.revive()[0] == ("add", "a", [5, 6, 9])


@on_a_loop
async def test_requests_keep_the_seeds_that_were_drawn_for_them() -> None:
    bench = Bench()
    bench.submit("a", "b")
    drawn = bench.engine.seeds
    bench.say("a", 5)
    bench.die()
    bench.revive()
    assert bench.engine.seeds == drawn == [seed_of("a"), seed_of("b")]


@on_a_loop
async def test_a_stream_sees_every_token_once() -> None:
    bench = Bench()
    stream = bench.submit("a")
    bench.say("a", 5)
    bench.die("a")
    bench.revive()
    bench.say("a", 6, finish_reason=FinishReason.STOP)
    batches = [deltas async for deltas in stream]
    assert [token for deltas in batches for delta in deltas for token in delta.token_ids] == [5, 6]
    assert not bench.client.records


@on_a_loop
async def test_those_with_tokens_since_the_last_death_are_not_suspected() -> None:
    bench = Bench()
    bench.submit("a", "b")
    bench.say("a", 5)
    bench.say("b", 6)
    assert not bench.die("a", "b")
    assert len(bench.revive()) == 2  # both at once
    assert not bench.die("a")  # again, and this time without having got on
    assert bench.revive() == [("add", "a", [5])]
    assert bench.told.count("on_quarantine") == 1


@on_a_loop
async def test_suspects_run_alone_one_after_the_other() -> None:
    bench = Bench()
    bench.submit("a", "b", "c")
    bench.engine.take()
    bench.say("c", 1)
    bench.die("a", "b", "c")
    assert bench.revive() == [("add", "a", [])]
    bench.submit("new")
    assert bench.engine.take() == []
    bench.say("a", 5)
    assert bench.engine.take() == [("finish", "a")]
    bench.say("a", 6)  # was on its way
    assert bench.engine.take() == []
    bench.say("a", finish_reason=FinishReason.ABORT)
    assert bench.engine.take() == [("add", "b", [])]
    bench.say("b", 7, finish_reason=FinishReason.LENGTH)  # has all it wanted
    assert bench.engine.take() == [("add", "a", [5, 6]), ("add", "c", [1]), ("add", "new", [])]
    assert "b" not in bench.client.records


@on_a_loop
async def test_one_that_kills_the_engine_alone_fails_and_says_so() -> None:
    bench = Bench(max_request_crashes=2)
    poison, good = bench.submit("poison"), bench.submit("good")
    bench.die("poison", "good")
    assert bench.revive() == [("add", "poison", [])]
    assert bench.die("poison")
    assert bench.revive() == [("add", "poison", [])]
    assert bench.die("poison")
    with pytest.raises(CrashFault, match="crashed the engine 3 times, 2 of them with no other"):
        await poison.__anext__()
    assert bench.revive() == [("add", "good", [])]
    bench.say("good", 1, finish_reason=FinishReason.STOP)
    assert len(await good.__anext__()) == 1


@on_a_loop
async def test_a_suspect_that_leaves_makes_room() -> None:
    bench = Bench()
    a, _b = bench.submit("a"), bench.submit("b")
    bench.die("a", "b")
    bench.revive()
    a.close()
    assert bench.engine.take() == [("finish", "a"), ("add", "b", [])]
    bench.say("a", finish_reason=FinishReason.ABORT)  # of a request that nobody waits for
    assert bench.engine.take() == []


@on_a_loop
async def test_one_that_is_too_much_before_any_step_is_found_as_well() -> None:
    bench = Bench(max_request_crashes=1)
    stream = bench.submit("a")
    bench.submit("b")
    assert not bench.die()
    assert len(bench.revive()) == 2
    assert not bench.die()
    assert bench.revive() == [("add", "a", [])]
    assert bench.die()
    with pytest.raises(CrashFault):
        await stream.__anext__()
    assert bench.revive() == [("add", "b", [])]


@on_a_loop
async def test_how_much_of_a_prompt_was_cached_is_settled_by_the_first_engine() -> None:
    bench = Bench()
    stream = bench.submit("a")
    bench.say("a", 5, num_cached_tokens=16)
    bench.die()
    bench.revive()
    bench.say("a", 6, num_cached_tokens=48, finish_reason=FinishReason.STOP)
    (first, second) = await stream.__anext__()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (16, 16)


@on_a_loop
async def test_when_the_engine_is_lost_everyone_hears_of_it() -> None:
    bench = Bench()
    stream = bench.submit("a")
    bench.die()
    bench.lose()
    with pytest.raises(EngineDeadError, match="for good"):
        await stream.__anext__()
    with pytest.raises(EngineDeadError):
        bench.submit("b")


class Deaf(EngineHandle):
    def _handle(self, answer: messages.EngineMessage) -> None:
        raise ValueError("a bug in whoever takes outputs in")


@on_a_loop
async def test_an_engine_that_is_no_longer_listened_to_is_killed() -> None:
    engine = Deaf(lambda info: None, lambda outputs: None, HangWatch(60, 60))
    death = await asyncio.wait_for(engine.died(), 60)
    assert death.how == "signal 9"


@on_a_loop
async def test_last_words_that_cannot_be_taken_in_do_not_hide_the_death() -> None:
    words = [messages.encode(Outputs())] * 2

    class DeafAtTheEnd(Deaf):
        def _next_frame(self) -> bytes | None:
            return words.pop() if self._has_exited and words else None

    engine = DeafAtTheEnd(lambda info: None, lambda outputs: None, HangWatch(60, 60))
    engine.kill()
    death = await asyncio.wait_for(engine.died(), 60)
    assert death.how == "signal 9"
    assert not words


@on_a_loop
async def test_an_engine_is_ready_before_the_outputs_that_came_with_that_message() -> None:
    """A new engine's counters start at zero. `on_ready` tells that, so it must come first."""
    seen: list[str] = []
    ready = messages.Ready(INFO)
    frames = [messages.encode(message) for message in (ready, Outputs())]

    class Waiting(EngineHandle):
        def _next_frame(self) -> bytes | None:
            return frames.pop(0) if frames else None

    engine = Waiting(
        lambda info: seen.append("ready"),
        lambda outputs: seen.append("outputs"),
        HangWatch(60, 60),
    )
    engine._receive()
    engine.kill()
    await asyncio.wait_for(engine.died(), 60)
    assert seen == ["ready", "outputs"]


@on_a_loop
async def test_while_there_is_no_engine_nobody_waits_longer_than_the_queue_allows() -> None:
    bench = Bench()
    bench.client.replicas._queue_timeout_s = 0.05
    ran, waits = bench.submit("ran"), bench.submit("waits")
    talks = bench.submit("talks")
    bench.say("talks", 5)
    bench.die("ran")
    late = bench.submit("late")
    (end,), (late_end,) = await asyncio.wait_for(asyncio.gather(ends_of(waits), ends_of(late)), 60)
    for delta in (end, late_end):
        assert delta.can_retry
        assert delta.error == "the request waited longer than 0.05 s for its turn; try again later"
    assert list(bench.client.records) == ["ran", "talks"], "who has had a turn may wait for more"
    assert bench.revive() == [("add", "ran", [])]  # a suspect, alone
    behind = bench.submit("behind")
    assert [delta.can_retry for delta in await asyncio.wait_for(ends_of(behind), 60)] == [True]
    bench.say("ran", 6, finish_reason=FinishReason.STOP)
    assert [delta.token_ids for delta in await ends_of(ran)] == [[6]]
    assert bench.engine.take() == [("add", "talks", [5])]
    talks.close()


@on_a_loop
async def test_suspects_that_never_ran_wait_no_longer_than_the_queue_allows() -> None:
    bench = Bench()
    bench.client.replicas._queue_timeout_s = 0.05
    streams = [bench.submit("first"), bench.submit("second")]
    for _ in range(2):  # it dies before any step, and they are suspected the second time
        bench.die()
        bench.revive()
    assert bench.dispatch_of(0).suspects == ["first", "second"]
    bench.engine.take()
    (end,) = await asyncio.wait_for(ends_of(streams[1]), 60)
    assert end.can_retry
    assert list(bench.client.records) == ["first"], "the engine checks those that it has"
    bench.die()
    (end,) = await asyncio.wait_for(ends_of(streams[0]), 60)
    assert end.can_retry
    stream = bench.submit("new")
    assert bench.revive() == [("add", "new", [])]
    stream.close()


@on_a_loop
async def test_when_the_client_of_the_last_suspect_leaves_the_others_go_on() -> None:
    bench = Bench()
    suspect = bench.submit("suspect")
    bench.die("suspect")
    assert bench.revive() == [("add", "suspect", [])]
    others = bench.submit("other")
    assert bench.engine.take() == []
    suspect.close()
    assert bench.engine.take() == [("finish", "suspect"), ("add", "other", [])]
    others.close()


@pytest.mark.parametrize("scarce", ["files", "sockets"])
def test_an_engine_that_cannot_be_started_leaves_nothing_behind(
    scarce: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    num_files = 3 if scarce == "files" else None

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)  # which is no OSError

    async def start() -> Death:
        decision = RestartDecision(had_progress=False, is_explained=False)
        supervisor = Supervisor(
            ServerConfig(), lambda _: None, lambda _: decision, lambda _: None, lambda _: None
        )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
        else:
            monkeypatch.setattr(zmq.Context, "socket", refuse)
        try:
            return await supervisor._live(EngineConfig())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await supervisor.close()

    num_fds = len(os.listdir("/proc/self/fd"))
    death = asyncio.run(start())
    assert death.how.startswith("it cannot be started: ")
    assert death.uptime_s is None
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def test_requests_are_counted_by_tenant_until_they_end() -> None:
    async def run() -> None:
        bench = Bench()
        stream = bench.submit("a", "b", "c")
        count = bench.client.ledger.num_by_tenant
        assert count[""] == 3
        bench.say("a", 1, finish_reason=FinishReason.STOP)
        assert count[""] == 2
        bench.client.ledger.fail(bench.client.records["b"], EngineDeadError("gone"))
        assert count[""] == 1
        stream.close()
        assert count[""] == 0

    asyncio.run(run())
