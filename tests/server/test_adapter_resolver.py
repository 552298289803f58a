"""Names that nobody has loaded are found in the folder of the resolver, and nowhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from adapter_scenarios import Setup, make_folders, play

from penstock.protocol.errors import InputError
from penstock.server.adapters import registry as registry_module
from penstock.server.adapters.holds import Hold, current_hold
from penstock.server.adapters.registry import MAX_FAILURES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "adapters")


@pytest.mark.parametrize("name", ["a", "b", "org/c"])
def test_unknown_names_are_found_in_the_resolvers_folder(folder: Path, name: str) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.request(name) as hold:
            assert hold.adapter is not None
            assert hold.adapter.path == str(folder / name)
        async with setup.request(name):
            pass
        assert setup.files.num_reads == 1
        assert [item.name for item in setup.registry.versions] == [name]

    play(folder, scenario, resolves=True)


@pytest.mark.parametrize(
    "name",
    [
        "..", "../adapters/a", "a/../b", "./a", "a/", "/a", "~", "~/a", "org", "", " ", "a\0",
        "a\nb", "org\\c", "org//c", "x" * 257, "x" * 1_000_000, "link",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_not_found(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "adapter_config.json").write_text("{}")
    (folder / "link").symlink_to(outside)

    async def scenario(setup: Setup) -> None:
        assert not await setup.registry.hold(name)
        assert not setup.files.num_reads
        assert not setup.registry._failures

    play(folder, scenario, resolves=True)


def test_an_absolute_path_is_not_a_name(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        assert not await setup.registry.hold(str(folder / "a"))

    play(folder, scenario, resolves=True)


def test_a_broken_adapter_is_read_once_for_many_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(setup: Setup) -> None:
        setup.engine.error = InputError("NaN in layer 3")
        for _ in range(10):
            with pytest.raises(InputError, match="NaN in layer 3") as caught:
                await setup.registry.hold("a")
            assert caught.value.field == "model"
        assert setup.files.num_reads == 1
        monkeypatch.setattr(registry_module, "FAILURE_S", 0.0)
        setup.engine.error = None
        async with setup.request("a"):
            assert setup.files.num_reads == 2
        assert not setup.registry._failures

    play(folder, scenario, resolves=True)


def test_only_so_many_failures_are_remembered(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        setup.files.contents.clear()
        for number in range(MAX_FAILURES + 10):
            name = f"n{number}"
            (folder / name).mkdir()
            (folder / name / "adapter_config.json").write_text("{}")
            with pytest.raises(InputError):
                await setup.registry.hold(name)
        assert len(setup.registry._failures) == MAX_FAILURES

    play(folder, scenario, resolves=True)


def test_requests_for_one_unknown_name_load_it_once(folder: Path) -> None:
    async def scenario(setup: Setup) -> None:
        current_hold.set(Hold())
        assert all(await asyncio.gather(*(setup.registry.hold("a") for _ in range(10))))
        assert setup.files.num_reads == 1
        assert setup.engine.calls == [("load", "digest of A")]

    play(folder, scenario, resolves=True)
