"""A registry of adapters with a scripted engine and scripted files, in which tests play scenes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from penstock.config.lora_modules import AdapterPlaces, LoRAModule
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import ModelError
from penstock.server.adapters.holds import AdapterHolds, Hold, current_hold
from penstock.server.adapters.registry import AdapterRegistry


class ScriptedEngine:
    """Remembers what it was asked, and fails or waits if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.replicas: list[int | None] = []  # of the loads; None: all
        self.pinned: set[str] = set()
        self.error: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, adapter: Adapter, pin: bool, replica: int | None = None) -> None:
        self.calls.append(("load", adapter.digest))
        self.replicas.append(replica)
        if pin:
            self.pinned.add(adapter.digest)
        await self.may_load.wait()
        if self.error is not None:
            raise self.error

    async def unload(self, digest: str) -> None:
        self.calls.append(("unload", digest))
        self.pinned.discard(digest)

    def end_requests(self, adapter: Adapter, error: Exception) -> None:
        self.calls.append(("end", adapter.digest, str(error)))


class Files:
    """Contents by path, as if on a disk."""

    def __init__(self, **contents: str) -> None:
        self.contents = contents
        self.num_reads = 0

    def find(self, name: str, path: str) -> Adapter:
        self.num_reads += 1
        key = Path(path).name
        if key not in self.contents:
            raise ModelError(f"no adapter at {path!r}")
        return Adapter(name, f"digest of {self.contents[key]}", path)


def make_folders(root: Path) -> Path:
    """Folders that look like adapters: a, b and org/c."""
    for name in ("a", "b", "org/c"):
        path = root / name
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
    return root


class Setup:
    def __init__(self, folder: Path, resolves: bool = False) -> None:
        self.engine = ScriptedEngine()
        self.files = Files(a="A", b="B", c="C")
        places = AdapterPlaces.parse("places", [str(folder)])
        self.registry = AdapterRegistry(
            self.engine,
            base_names=["base"],
            resolver=places if resolves else AdapterPlaces(),
            allowed=places,
            num_host=2,
            find=self.files.find,
        )
        self.folder = folder

    async def load(self, name: str, at: str | None = None, **options: bool) -> None:
        module = LoRAModule(name, str(self.folder / (at or name)))
        await self.registry.load(module, **{"replace": False, "pin": False, **options})

    async def unloading(self, name: str, end_requests: bool = False) -> asyncio.Task[None]:
        """An unload that has come as far as it can."""
        task = asyncio.ensure_future(self.registry.unload(name, end_requests=end_requests))
        await settle()
        return task

    @contextlib.asynccontextmanager
    async def request(self, name: str) -> AsyncIterator[Hold]:
        """An HTTP request for a model, until its response was sent."""
        begun, may_end = asyncio.Event(), asyncio.Event()
        holds: list[Hold] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                assert await self.registry.hold(name)
                hold = current_hold.get()
                assert hold is not None
                holds.append(hold)
            finally:
                begun.set()
            await may_end.wait()

        nothing: Any = None
        task = asyncio.ensure_future(AdapterHolds(app)({"type": "http"}, nothing, nothing))
        await begun.wait()
        if not holds:
            await task
        yield holds[0]
        may_end.set()
        await task


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


Scenario = Callable[[Setup], Coroutine[Any, Any, None]]


def play(folder: Path, scenario: Scenario, resolves: bool = False) -> Setup:
    made: list[Setup] = []

    async def run() -> None:
        made.append(Setup(folder, resolves))
        try:
            await scenario(made[0])
            await settle()
        finally:
            made[0].registry.close()

    asyncio.run(run())
    return made[0]
