"""Reads split GGUF files: `model-00001-of-00003.gguf` and its siblings are one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.loading.gguf.file import GGUFFile, GGUFTensor, read_gguf
from penstock.loading.gguf.metadata import fail
from penstock.loading.gguf.mmproj import is_mmproj
from penstock.protocol.errors import ModelError

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def read_model(path: Path) -> GGUFFile:
    """The model in a GGUF file, or in all files of a split model, given the first.

    Raises ModelError, which names them, for files that are missing or do not belong together.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    paths = _split_paths(first, count)
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        fail(first, f"the model is split into {count} files, of which {shown} are not beside it")
    tensors: dict[str, GGUFTensor] = {}
    for number, each in enumerate(paths):
        part = first if number == 0 else read_gguf(each)
        found = part.metadata.get("split.no"), part.metadata.get("split.count")
        if found != (number, count):
            fail(
                part, f"must be file {number} of {count} (split.no, split.count), but says {found}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                fail(part, f"tensor {name!r} is in another of the {count} files, too")
            tensors[name] = tensor._replace(path=each)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        fail(
            first, f"must have {total} tensors (split.tensors.count), but there are {len(tensors)}"
        )
    return replace(first, tensors=tensors, paths=tuple(paths))


def _split_paths(first: GGUFFile, count: object) -> list[Path]:
    """The files of a split model. Raises ModelError if this is not the first, or misnamed."""
    match = _NAME.fullmatch(first.path.name)
    if type(count) is not int or not 1 < count < 10**5:
        fail(first, f"split.count must be the number of files, got {count!r:.80}")
    if match is None or int(match["count"]) != count:
        fail(
            first,
            f"one of {count} files that a model was split into, whose name must end in "
            f"-00001-of-{count:05}.gguf",
        )
    if int(match["number"]) != 1:
        fail(first, f"pass the first of the {count} files: {_name(match['stem'], 1, count)}")
    folder = first.path.parent
    return [folder / _name(match["stem"], number + 1, count) for number in range(count)]


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def choose_gguf(folder: Path, paths: Sequence[Path]) -> Path:
    """The one model among .gguf files, by its first file. Raises ModelError if there are several.

    Vision encoders (`mmproj-...`) beside a model do not count.
    """
    texts = [path for path in paths if not is_mmproj(path)]
    matches = {path: _NAME.fullmatch(path.name) for path in texts or paths}
    firsts = [
        path
        for path, match in matches.items()
        if match is None or int(match["number"]) == 1 or not _has_first(path, match)
    ]
    if len(firsts) > 1:
        listed = ", ".join(str(path) for path in firsts)
        raise ModelError(f"{folder} holds several models; pass the path of one of: {listed}")
    return firsts[0]


def _has_first(path: Path, match: re.Match[str]) -> bool:
    return (path.parent / _name(match["stem"], 1, int(match["count"]))).is_file()
