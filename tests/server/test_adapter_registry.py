"""Names of adapters: loading, replacing and unloading, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from adapter_scenarios import Setup, make_folders, play, settle

from penstock.config.lora_modules import AdapterPlaces, LoRAModule
from penstock.protocol.errors import ConfigError, EngineDeadError, InputError
from penstock.server.adapters.holds import current_hold, held_for_longer
from penstock.server.http.errors import NotFound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "adapters")


def test_a_request_keeps_the_version_that_it_began_with(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x") as before:
            await setup.load("x", "b", replace=True)
            async with setup.request("x") as after:
                assert before.adapter is not None
                assert after.adapter is not None
                assert before.adapter.digest == "digest of A"
                assert after.adapter.digest == "digest of B"
            await settle()
            assert ("unload", "digest of A") not in setup.engine.calls

    setup = play(folder, scenario)
    assert setup.engine.calls[-1] == ("unload", "digest of A")


def test_a_name_is_replaced_only_if_that_is_asked_for(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        with pytest.raises(InputError, match="already been loaded: set load_inplace"):
            await setup.load("x", "b")
        assert setup.registry.versions[0].adapter.digest == "digest of A"

    play(folder, scenario)


def test_unloading_waits_for_requests(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x") as hold:
            unloading = await setup.unloading("x")
            assert not unloading.done()
            assert not await setup.registry.hold("x"), "new requests do not find it"
            assert hold.adapter is not None, "and those that run go on"
        await unloading
        assert setup.engine.calls[-1] == ("unload", "digest of A")

    play(folder, scenario)


def test_unloading_ends_requests_if_that_is_asked_for(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x") as hold:
            unloading = await setup.unloading("x", end_requests=True)
            assert setup.engine.calls[-1][:2] == ("end", "digest of A")
            with pytest.raises(NotFound, match="'x' was unloaded"):
                _ = hold.adapter  # one that is not on the engine yet
        await unloading

    play(folder, scenario)


def test_unloading_also_waits_for_requests_of_a_replaced_version(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x"):
            await setup.load("x", "b", replace=True)
            unloading = await setup.unloading("x")
            assert not unloading.done()
        await unloading

    play(folder, scenario)


def test_unloading_goes_on_if_its_client_leaves(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x"):
            unloading = await setup.unloading("x")
            unloading.cancel()
            await settle()

    setup = play(folder, scenario)
    assert setup.engine.calls[-1] == ("unload", "digest of A")


def test_a_response_in_the_background_holds_its_adapter_until_it_ends(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        async with setup.request("x") as hold:
            current_hold.set(hold)
            with held_for_longer() as longer:
                pass
            assert current_hold.get() is hold
        unloading = await setup.unloading("x")
        assert not unloading.done()
        longer.release()
        await unloading

    play(folder, scenario)


def test_content_that_another_name_has_stays_on_the_engine(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("x", "a")
        await setup.load("y", "a")
        await setup.registry.unload("x", end_requests=False)
        assert ("unload", "digest of A") not in setup.engine.calls
        await setup.registry.unload("y", end_requests=False)
        assert setup.engine.calls[-1] == ("unload", "digest of A")

    play(folder, scenario)


@pytest.mark.parametrize("error", [InputError("rank 99 is too large"), EngineDeadError("dead")])
def test_a_thousand_loads_that_fail_leave_nothing(folder: Path, error: Exception) -> None:
    async def scenario(setup: Setup) -> None:
        setup.engine.error = error
        for number in range(1000):
            with pytest.raises(type(error), match=str(error)):
                await setup.load(f"x{number}", "a", pin=True)
        await settle()
        registry = setup.registry
        assert not registry.versions
        assert not setup.engine.pinned
        kept = (registry._retiring, registry._loading, registry._locks, registry._tasks)
        assert not any(kept)

    play(folder, scenario)


def test_a_load_whose_client_leaves_leaves_nothing(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        setup.engine.may_load.clear()
        loading = asyncio.ensure_future(setup.load("x", "a", pin=True))
        while not setup.engine.calls:
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        await settle()
        assert setup.engine.calls == [("load", "digest of A"), ("unload", "digest of A")]
        assert not setup.registry.versions
        setup.engine.may_load.set()
        await setup.load("x", "a")

    play(folder, scenario)


def test_loads_and_unloads_of_one_name_happen_one_after_the_other(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        async def load() -> bool:
            with contextlib.suppress(InputError):
                await setup.load("x", "a")
                return True
            return False

        async def unload() -> bool:
            with contextlib.suppress(NotFound):
                await setup.registry.unload("x", end_requests=False)
                return True
            return False

        for _ in range(20):
            results = await asyncio.gather(*(work() for _ in range(5) for work in (load, unload)))
            loads, unloads = sum(results[::2]), sum(results[1::2])
            assert loads - unloads == len(setup.registry.versions)
            if loads > unloads:
                assert await unload()
        assert not setup.registry._locks

    play(folder, scenario)


def test_an_engine_that_starts_again_gets_pinned_adapters_and_recent_ones(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("pinned", "a", pin=True)
        await setup.load("old", "b")
        await setup.load("recent", "org/c")
        setup.engine.calls.clear()
        nothing: Any = None
        setup.registry.on_ready(0, nothing)

    setup = play(folder, scenario)
    assert setup.engine.calls == [("load", "digest of A"), ("load", "digest of C")]


def test_each_replica_that_starts_gets_the_adapters_and_the_others_do_not(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("a", "a", pin=True)
        nothing: Any = None
        setup.registry.on_ready(1, nothing)
        setup.registry.on_ready(2, nothing)

    setup = play(folder, scenario)
    assert setup.engine.replicas == [None, 1, 2]


def test_nothing_is_pinned_before_what_was_pinned_when_the_engine_crashed(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        await setup.load("first", "a", pin=True)
        await setup.load("second", "b", pin=True)
        setup.engine.calls.clear()
        setup.engine.may_load.clear()
        nothing: Any = None
        setup.registry.on_ready(0, nothing)
        setup.registry.on_ready(0, nothing)  # it crashed again
        new = asyncio.ensure_future(setup.load("new", "org/c", pin=True))
        while setup.files.num_reads < 3:  # the new one has been read
            await asyncio.sleep(0)
        await settle()
        setup.engine.may_load.set()
        await new

    setup = play(folder, scenario)
    loaded = [digest for _, digest in setup.engine.calls]
    assert loaded[-1] == "digest of C"
    assert sorted(set(loaded)) == ["digest of A", "digest of B", "digest of C"]


@pytest.mark.parametrize(
    ("module", "field", "message"),
    [
        (LoRAModule("base", "a"), "lora_name", "is the base model"),
        (LoRAModule("", "a"), "lora_name", "must not be empty"),
        (LoRAModule("x" * 1_000_000, "a"), "lora_name", "at most 256 characters, got 1000000"),
        (LoRAModule("a\nb", "a"), "lora_name", "control characters"),
        (LoRAModule("../x", "a"), "lora_name", "'.' or '..' between slashes, got '../x'"),
        (LoRAModule(".", "a"), "lora_name", "'.' or '..' between slashes, got '.'"),
        (LoRAModule("x", "a", "other"), "base_model_name", "must be one of base, got 'other'"),
        (LoRAModule("x", "/etc"), "lora_path", "is not allowed"),
        (LoRAModule("x", "../outside"), "lora_path", "is not allowed"),
        (LoRAModule("x", "nowhere/else"), "lora_path", "is not allowed"),
        (LoRAModule("x", "pypi:evil==1"), "lora_path", "is not allowed"),
        (LoRAModule("x", "a\0b"), "lora_path", "is not allowed"),
        (LoRAModule("x", "y" * 1_000_000), "lora_path", "is not allowed"),
    ],
)
def test_what_is_wrong_with_a_load_is_said_with_the_field(
    folder: Path, module: LoRAModule, field: str, message: str
) -> None:
    async def scenario(setup: Setup) -> None:
        with pytest.raises(InputError, match=message) as caught:
            await setup.registry.load(module, replace=False, pin=False)
        assert caught.value.field == field
        assert len(str(caught.value)) < 1000
        assert not setup.engine.calls

    play(folder, scenario)


def test_paths_through_symlinks_out_of_the_allowed_folders_are_refused(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / "link").symlink_to(outside)

    async def scenario(setup: Setup) -> None:
        for path in ("link", "a/../../outside", "a/../link"):
            with pytest.raises(InputError, match="is not allowed"):
                await setup.load("x", path)
        assert not setup.engine.calls

    play(folder, scenario)


def test_hub_ids_and_packages_are_allowed_by_pattern() -> None:
    places = AdapterPlaces.parse("allowed", ["hub:my-org/*", "pypi:acme-*"])
    assert places.has_hub_id("my-org/sql")
    assert not places.has_hub_id("my-org-evil/sql")
    assert places.has_packages("pypi:acme-sql==1")
    assert not places.has_packages("pypi:acme-sql==1,evil==2")
    assert not places.has_packages("pypi:evil==1")


def test_an_adapter_of_the_command_line_that_cannot_be_loaded_ends_the_start(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        modules = [LoRAModule("x", str(folder / "a")), LoRAModule("y", "nowhere")]
        with pytest.raises(ConfigError, match="lora_modules: 'y': no adapter at 'nowhere'"):
            await setup.registry.load_all(modules)

    play(folder, scenario)
