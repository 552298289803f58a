"""AdapterRegistry: owns the names of LoRA adapters.

A name stands for one version at a time. A request keeps the version that it began with. Engines
know no names: requests carry their adapter, and an engine that starts later loads it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from penstock.config.lora_modules import AdapterPlaces, LoRAModule, why_bad_name
from penstock.engine.messages import EngineInfo
from penstock.engine.observer import Observer
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import ConfigError, InputError, ModelError, PenstockError
from penstock.server.adapters.holds import AdapterVersion, current_hold, was_unloaded
from penstock.server.adapters.sources import check_allowed, find_adapter, resolve_name
from penstock.server.http.errors import NotFound

logger = logging.getLogger(__name__)

T = TypeVar("T")
NUM_FILE_THREADS = 4  # that hash and fetch files at once
MAX_FAILURES = 1024  # of the resolver, that are remembered
FAILURE_S = 30.0  # for which a name is not tried again


Refusal = InputError | NotFound


class AdapterEngine(Protocol):
    """What the engine does with adapters."""

    async def load(self, adapter: Adapter, pin: bool, replica: int | None = None) -> None:
        """Load into host memory and check everything. Raises `InputError`.

        On one replica, or on all that are running.
        """

    async def unload(self, digest: str) -> None:
        """Unpin, and drop it from host memory."""

    def end_requests(self, adapter: Adapter, error: Exception) -> None:
        """End the requests that run with this adapter."""


class ServedAdapters(Protocol):
    """The adapters as the server's requests see them. See `AdapterRegistry`."""

    @property
    def versions(self) -> list[AdapterVersion]: ...

    def find(self, name: str) -> AdapterVersion | None: ...

    async def hold(self, name: str) -> bool: ...

    async def load(self, module: LoRAModule, *, replace: bool, pin: bool) -> AdapterVersion: ...

    async def unload(self, name: str, *, end_requests: bool) -> None: ...

    def close(self) -> None: ...


class AdapterListener(Protocol):
    """Follows which versions there are."""

    def on_load(self, version: AdapterVersion) -> None:
        """Its name stands for this version from now on."""

    def on_retire(self, version: AdapterVersion, ends_requests: bool) -> None:
        """Its name does not. With `ends_requests`, requests that use it end."""


class AdapterRegistry(Observer):
    """Use it from one event loop. `base_names` are the names of the base model.

    `num_host` adapters fit into the engine's host memory.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        base_names: Sequence[str],
        resolver: AdapterPlaces = AdapterPlaces(),
        allowed: AdapterPlaces = AdapterPlaces(),
        num_host: int = 1,
        find: Callable[[str, str], Adapter] = find_adapter,  # by name and path
    ) -> None:
        self.listeners: list[AdapterListener] = []
        self._engine = engine
        self._base_names = base_names
        self._resolver = resolver
        self._allowed = allowed
        self._num_host = num_host
        self._find = find
        self._versions: dict[str, AdapterVersion] = {}  # by name, in the order of loading
        self._retiring: dict[AdapterVersion, asyncio.Task[None]] = {}  # replaced or unloaded,
        # and still used
        self._loading = Counter[str]()  # digests
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # of names that someone changes
        self._failures: dict[str, tuple[float, Refusal]] = {}  # of the resolver, by name
        self._uses = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloads: dict[int, asyncio.Task[None]] = {}  # into replicas that started again
        self._threads = ThreadPoolExecutor(NUM_FILE_THREADS, thread_name_prefix="adapters")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in (*self._retiring.values(), *self._tasks):
            task.cancel()

    # -- names

    @property
    def versions(self) -> list[AdapterVersion]:
        """The loaded adapters, in the order of loading."""
        return list(self._versions.values())

    def find(self, name: str) -> AdapterVersion | None:
        return self._versions.get(name)

    async def hold(self, name: str) -> bool:
        """Let the current HTTP request use the adapter of this name. False if there is none.

        A name that is not loaded is looked up by the resolvers. Raises their `InputError` for an
        adapter that is broken.
        """
        version = self._versions.get(name) or await self.resolve(name)
        if version is None:
            return False
        self.use(name)
        hold = current_hold.get()
        assert hold is not None, "AdapterHolds is missing from the app"
        hold.take(version)
        return True

    def use(self, name: str) -> None:
        """A request uses the adapter of this name, if there is one."""
        if name in self._versions:
            self._versions[name].last_used = next(self._uses)

    async def resolve(self, name: str) -> AdapterVersion | None:
        """Look a name up. Returns None if nothing is there, and raises as `hold` does."""
        if not str(self._resolver) or why_bad_name(name) is not None:
            return None
        async with self._locked(name):
            if name in self._versions:
                return self._versions[name]
            self._raise_failure(name)
            path = await self._in_thread(resolve_name, name, self._resolver)
            if path is None:
                return None  # that was cheap: a file may be there the next time
            try:
                return await self._load(LoRAModule(name, path), "model")
            except (InputError, NotFound) as error:
                self._failures[name] = time.monotonic(), error.with_traceback(None)
                if len(self._failures) > MAX_FAILURES:
                    del self._failures[next(iter(self._failures))]
                raise

    def _raise_failure(self, name: str) -> None:
        """Raise a name's recent error again, without another look at files or the hub."""
        if name not in self._failures:
            return
        failed_at, error = self._failures[name]
        if time.monotonic() - failed_at < FAILURE_S:
            raise type(error)(str(error), error.field or "model")
        del self._failures[name]

    # -- loading and unloading

    async def load_all(self, modules: Sequence[LoRAModule]) -> None:
        """Load the adapters of the command line. Raises `ConfigError`."""
        for module in modules:
            try:
                self._check(module, "lora_modules")
                await self._load(module, "lora_modules")
            except (InputError, NotFound) as error:
                raise ConfigError(f"lora_modules: {module.name!r}: {error}") from error

    async def load(self, module: LoRAModule, *, replace: bool, pin: bool) -> AdapterVersion:
        """Load an adapter for a client. Everything is checked before the name is served.

        With `replace`, it takes the place of one with the same name. Requests that run keep
        theirs. Raises `InputError` and `NotFound`, and then nothing has changed.
        """
        self._check(module, "lora_name")
        await self._in_thread(check_allowed, module.path, self._allowed)
        async with self._locked(module.name):
            if module.name in self._versions and not replace:
                raise InputError(
                    f"the adapter {module.name!r} has already been loaded: set load_inplace to "
                    "replace it",
                    "lora_name",
                )
            return await self._load(module, "lora_path", pin)

    def _check(self, module: LoRAModule, field: str) -> None:
        if (wrong := why_bad_name(module.name)) is not None:
            raise InputError(wrong, field)
        if module.name in self._base_names:
            raise InputError(f"{module.name!r} is the base model: choose another name", field)
        if module.base_model_name not in (None, *self._base_names):
            raise InputError(
                f"base_model_name must be one of {', '.join(self._base_names)}, got "
                f"{module.base_model_name!r:.100}",
                "base_model_name",
            )

    async def _load(self, module: LoRAModule, field: str, pin: bool = False) -> AdapterVersion:
        """Load and register an adapter. Errors are about `field`."""
        try:
            adapter = await self._in_thread(self._find, module.name, module.path)
        except FileNotFoundError as error:
            raise NotFound(str(error), field) from error
        except (ModelError, InputError) as error:
            raise InputError(str(error), field) from error
        self._loading[adapter.digest] += 1
        try:
            if pin and self._reloads:  # those that were pinned before come first
                await asyncio.wait(self._reloads.values())
            await self._engine.load(adapter, pin)
        except BaseException as error:
            self._run(self._drop(adapter.digest))  # it may be loaded or pinned all the same
            if isinstance(error, InputError) and error.field != "lora_name":
                raise InputError(str(error), field) from error
            raise
        finally:
            self._loading -= Counter([adapter.digest])  # without those at zero
        version = AdapterVersion(
            adapter,
            root=module.path,
            parent=module.base_model_name or self._base_names[0],
            created=int(time.time()),
            is_pinned=pin,
            last_used=next(self._uses),
        )
        before = self._versions.pop(module.name, None)
        self._versions[module.name] = version
        for listener in self.listeners:
            listener.on_load(version)
        self._failures.pop(module.name, None)
        if before is not None:
            self._retire(before)
        logger.info("Loaded adapter %r from %s", adapter.name, adapter.path)
        return version

    async def unload(self, name: str, *, end_requests: bool) -> None:
        """Take a name away, and wait until the last request that uses it has ended.

        With `end_requests`, they end now. If the caller leaves, the rest happens all the same.
        """
        async with self._locked(name):
            version = self._versions.pop(name, None)
        if version is None:
            raise NotFound(f"there is no adapter {name!r:.100} here", "lora_name")
        self._retire(version)
        ending = [item for item in self._retiring if item.name == name]
        for item in ending if end_requests else ():
            item.was_unloaded = True
            self._tell_retired(item)
            self._engine.end_requests(item.adapter, was_unloaded(name))
        await asyncio.wait([self._retiring[item] for item in ending])
        logger.info("Unloaded adapter %r", name)

    def _retire(self, version: AdapterVersion) -> None:
        """Drop a version from the engine once no request uses it."""

        async def wait_and_drop() -> None:
            await version.wait_until_unused()
            del self._retiring[version]
            await self._drop(version.adapter.digest)

        self._retiring[version] = asyncio.ensure_future(wait_and_drop())
        self._tell_retired(version)

    def _tell_retired(self, version: AdapterVersion) -> None:
        for listener in self.listeners:
            listener.on_retire(version, version.was_unloaded)

    async def _drop(self, digest: str) -> None:
        """Drop an adapter from the engine, unless another name or request uses its content."""
        versions = (*self._versions.values(), *self._retiring)
        if self._loading[digest] or any(item.adapter.digest == digest for item in versions):
            return
        with contextlib.suppress(PenstockError):  # an engine that is gone has nothing to drop
            await self._engine.unload(digest)

    # -- the engine

    def on_ready(self, replica: int, info: EngineInfo) -> None:
        """An engine was started: load what requests are likely to want."""
        if replica in self._reloads:
            self._reloads[replica].cancel()
        self._reloads[replica] = self._run(self._load_again(replica))

    async def _load_again(self, replica: int) -> None:
        recent = sorted(self._versions.values(), key=lambda item: -item.last_used)
        recent.sort(key=lambda item: not item.is_pinned)
        for version in recent[: self._num_host]:
            if self._versions.get(version.name) is not version:
                continue
            try:
                await self._engine.load(version.adapter, version.is_pinned, replica)
            except PenstockError as error:
                logger.warning("Adapter %r was not loaded again: %s", version.name, error)

    # -- helpers

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _locked(self, name: str) -> asyncio.Lock:
        """Loads and unloads of one name happen one after the other."""
        return self._locks.setdefault(name, asyncio.Lock())
