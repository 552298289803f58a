"""Where a server's LoRA adapters come from: named modules, allowed sources, resolvers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from penstock.protocol.errors import ConfigError

MAX_NAME_LENGTH = 256
HUB = "hub:"  # before a pattern of hub ids
PYPI = "pypi:"  # before a pattern of packages


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter and the name under which it is served."""

    name: str
    path: str
    base_model_name: str | None = None  # one of the served names; it becomes the card's `parent`


def parse_lora_module(text: str) -> LoRAModule:
    """Read ``name=path`` or JSON. Raises `ConfigError`."""
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=LoRAModule)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f'lora_modules must be name=path or JSON such as {{"name": "sql", "path": '
                f'"/adapters/sql"}}, got {text!r:.200}: {error}'
            ) from error
    else:
        name, equals, path = text.partition("=")
        if not equals:
            raise ConfigError(f"lora_modules must be name=path, got {text!r:.200}")
        module = LoRAModule(name.strip(), path.strip())
    if (wrong := why_bad_name(module.name)) is not None:
        raise ConfigError(f"lora_modules: {wrong}")
    if not module.path:
        raise ConfigError(f"lora_modules: the path of {module.name!r} is empty")
    return module


def why_bad_name(name: str) -> str | None:
    """Why an adapter cannot have this name; None if it can."""
    if not name.strip():
        return "an adapter's name must not be empty"
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"an adapter's name may have at most {MAX_NAME_LENGTH} characters, got {len(name)}: "
            f"{name!r:.80}"
        )
    if not name.isprintable():
        return f"an adapter's name must not hold control characters, got {name!r:.80}"
    if {".", ".."} & set(name.split("/")):  # HTTP clients drop them from /v1/models/NAME
        return f"an adapter's name must not hold '.' or '..' between slashes, got {name!r:.80}"
    return None


@dataclass(frozen=True)
class AdapterPlaces:
    """Folders, and patterns of hub ids and of packages. `*` in a pattern matches anything."""

    folders: tuple[Path, ...] = ()
    hub_patterns: tuple[str, ...] = ()
    pypi_patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, option: str, places: Sequence[str]) -> AdapterPlaces:
        """Read an option's value. Raises `ConfigError` for a folder that does not exist."""
        others = [place for place in places if not place.startswith((HUB, PYPI))]
        for place in others:
            if not place or not Path(place).expanduser().is_dir():
                raise ConfigError(
                    f"{option} takes folders, hub:PATTERN or pypi:PATTERN, got {place!r}, "
                    "which is no folder"
                )
        return cls(
            tuple(Path(place).expanduser().resolve() for place in others),
            tuple(place.removeprefix(HUB) for place in places if place.startswith(HUB)),
            tuple(place.removeprefix(PYPI) for place in places if place.startswith(PYPI)),
        )

    def has_hub_id(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.hub_patterns)

    def has_packages(self, spec: str) -> bool:
        """Whether every package of ``pypi:a==1,b==2`` is allowed."""
        names = [part.partition("==")[0].strip() for part in spec.removeprefix(PYPI).split(",")]
        return all(
            any(fnmatchcase(name, pattern) for pattern in self.pypi_patterns) for name in names
        )

    def has_path(self, path: Path) -> bool:
        """Whether a path without symlinks is inside one of the folders."""
        return any(path.is_relative_to(folder) for folder in self.folders)

    def __str__(self) -> str:
        hub = (f"{HUB}{pattern}" for pattern in self.hub_patterns)
        pypi = (f"{PYPI}{pattern}" for pattern in self.pypi_patterns)
        return ", ".join([*map(str, self.folders), *hub, *pypi])
