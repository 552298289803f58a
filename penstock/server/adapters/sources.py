"""Finds adapters: decides which paths and names clients may use, and what a name stands for.

Everything here may read disks or ask the hub: call it in a thread.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from penstock.config.lora_modules import PYPI, AdapterPlaces, why_bad_name
from penstock.loading.adapters.source import adapter_digest, locate_adapter
from penstock.loading.hub import is_hub_id
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import InputError


def find_adapter(name: str, spec: str, download_dir: str | None = None) -> Adapter:
    """The adapter at a path, a hub id or in a package, with its digest.

    Raises `FileNotFoundError` for a path where there is nothing, else `ModelError`.
    """
    is_path = not spec.startswith(PYPI) and not is_hub_id(spec)
    if is_path and not Path(spec).expanduser().exists():
        raise FileNotFoundError(f"no adapter at {spec!r:.200}: there is no such file or folder")
    path = locate_adapter(spec, download_dir=download_dir)
    # Without symlinks, so that others who change them change nothing here. A file keeps its name.
    path = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    return Adapter(name, adapter_digest(path), str(path))


def check_allowed(spec: str, places: AdapterPlaces) -> None:
    """Raise `InputError` unless clients may load this path, hub id or package.

    What is outside is refused before anything looks whether it exists.
    """
    if not _is_allowed(spec, places):
        allowed = f"only from {places}" if str(places) else "from nowhere"
        raise InputError(
            f"lora_path {spec!r:.200} is not allowed: this server loads adapters {allowed} "
            "(--allowed-lora-paths)",
            "lora_path",
        )


def _is_allowed(spec: str, places: AdapterPlaces) -> bool:
    if "\0" in spec:
        return False
    if spec.startswith(PYPI):
        return places.has_packages(spec)
    try:
        path = Path(spec).expanduser().resolve()
        if places.has_path(path):
            return True  # the reader refuses links from inside the adapter's folder to elsewhere
        is_local = path.exists()
    except (OSError, RuntimeError):  # too long, a loop of symlinks, no such user
        return False
    return not is_local and is_hub_id(spec) and places.has_hub_id(spec)


def resolve_name(name: str, places: AdapterPlaces) -> str | None:
    """The path or hub id that an unknown model name stands for, or None."""
    if why_bad_name(name) is not None:
        return None
    parts = PurePosixPath(name).parts
    is_plain = "/".join(parts) == name and not {".", "..", "~"} & set(parts) and "\\" not in name
    if not is_plain or name.startswith("/"):
        return None
    for folder in places.folders:
        try:
            path = (folder / name).resolve()
            if places.has_path(path) and _is_adapter(path):
                return str(path)
        except (OSError, RuntimeError):
            continue
    return name if is_hub_id(name) and places.has_hub_id(name) else None


def _is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file() or (path.suffix == ".gguf" and path.is_file())
