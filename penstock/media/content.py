"""Media as users give them, before they are read and decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from penstock.protocol.errors import InputError
from penstock.protocol.media import Modality

MODALITIES = get_args(Modality)
MAX_UUID_LENGTH = 256
PIXELS = "uint8"


@dataclass(frozen=True, kw_only=True)
class MediaContent:
    """An item of a prompt: a file, a URL, pixels, embeddings, or the uuid of an earlier item."""

    modality: Modality
    where: str  # the field that it came from
    data: bytes | None = field(default=None, repr=False)
    url: str | None = field(default=None, repr=False)
    # `data` is not a file but pixels of this shape: [height, width, 3], of a video with [frames]
    # before; or embeddings [rows, width] of 32-bit floats.
    shape: tuple[int, ...] | None = None
    is_embeds: bool = False
    uuid: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the processor
    io_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of decoding
    # Of frames or embeddings: what a file would tell, such as fps, or what a processor would.
    facts: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> str:
        """How the content is decoded and processed, in one text."""
        return repr((self.modality, _sorted(self.kwargs), _sorted(self.io_kwargs)))

    def digest(self, kind: str) -> bytes:
        """Covers the content and how it is processed; `kind` covers the processor."""
        assert self.data is not None, "it was read"
        form = repr((self.shape, self.is_embeds, _sorted(self.facts), kind))
        return hashlib.sha256(f"{self.options()}{form}\0".encode() + self.data).digest()


def _sorted(given: Any) -> Any:
    if isinstance(given, Mapping):
        return sorted((key, _sorted(value)) for key, value in given.items())
    return given


def check_uuid(given: object, where: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= MAX_UUID_LENGTH:
        raise InputError(
            f"{where}.uuid must be a string of 1 to {MAX_UUID_LENGTH} characters, got "
            f"{given!r:.80}",
            f"{where}.uuid",
        )
    return given


def read_multi_modal_data(
    data: object, kwargs: object = None, uuids: object = None, where: str = "multi_modal_data"
) -> list[MediaContent]:
    """The `multi_modal_data` of a prompt: an item or a list of items for image and for video.

    An image is one of Pillow's, an array [height, width, 3] of uint8, or a file (its bytes or its
    path). A video is an array [frames, height, width, 3], a file, or a pair of frames and their
    metadata (fps, frames_indices, total_num_frames). A list of frames is one video. Both may be
    embeddings [rows, width]. With `uuids`, an item may be None: sent before.
    """
    for given, name in ((kwargs, "mm_processor_kwargs"), (uuids, "multi_modal_uuids")):
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"{name} must be a dictionary, got {given!r:.80}", name)
    if not isinstance(data, Mapping):
        raise InputError(f'{where} must be {{"image": ...}}, got {data!r:.80}', where)
    options = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    found = []
    for modality, given in data.items():
        if modality not in MODALITIES:
            raise InputError(f"{where} may contain image and video, got {modality!r}", where)
        names = _listed(uuids.get(modality)) if isinstance(uuids, Mapping) else []
        if modality == "video":
            given = _stacked(given)
        for index, one in enumerate(_listed(given)):
            at = f"{where}.{modality}" + (f"[{index}]" if isinstance(given, list) else "")
            uuid = check_uuid(names[index] if index < len(names) else None, at)
            found.append(replace(read_item(one, modality, at, uuid), kwargs=options))
    return found


def with_kwargs(content: MediaContent, kwargs: object) -> MediaContent:
    """The item with these `mm_processor_kwargs` besides its own, which come first."""
    if kwargs is None:
        return content
    if not isinstance(kwargs, Mapping):
        raise InputError(
            f"mm_processor_kwargs must be a dictionary, got {kwargs!r:.80}", "mm_processor_kwargs"
        )
    return replace(content, kwargs={**kwargs, **content.kwargs})


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list) else [given]


def read_item(given: Any, modality: Modality, where: str, uuid: str | None = None) -> MediaContent:
    """An item of the Python API."""
    facts: Mapping[str, Any] = {}
    if modality == "video":
        if isinstance(given, tuple) and len(given) == 2:
            given, facts = given
        given = _stacked(given)
    if isinstance(given, Path):
        given = _read_path(given, where)
    if given is None and uuid is not None:
        return MediaContent(modality=modality, where=where, uuid=uuid)
    if isinstance(given, (bytes, bytearray)):
        return MediaContent(modality=modality, where=where, data=bytes(given), uuid=uuid)
    if modality == "image" and hasattr(given, "convert") and hasattr(given, "tobytes"):  # Pillow's
        from penstock.media.decode import to_rgb

        rgb = to_rgb(given)
        shape = (rgb.height, rgb.width, 3)
        return MediaContent(
            modality=modality, where=where, data=rgb.tobytes(), shape=shape, uuid=uuid
        )
    if isinstance(given, Mapping) and (name := f"{modality}_embeds") in given:
        given, facts = given[name], {**given, name: None}
    if hasattr(given, "detach"):  # a tensor of torch's
        given = given.detach().cpu().float().numpy() if given.ndim == 2 else given.cpu().numpy()
    shape = tuple(getattr(given, "shape", ()))
    dims = {"image": 3, "video": 4}[modality]
    if len(shape) == dims and shape[-1] == 3 and str(given.dtype) == PIXELS:
        if modality == "video":
            facts = _video_facts(facts, shape[0], where)
        return MediaContent(
            modality=modality, where=where, data=given.tobytes(), shape=shape, uuid=uuid,
            facts=facts,
        )  # fmt: skip
    if len(shape) == 2:
        return embeds_content(given, modality, where, facts, uuid)
    forms = {
        "image": "an image of Pillow's, an array [height, width, 3] of uint8",
        "video": "an array [frames, height, width, 3] of uint8",
    }
    raise InputError(
        f"{where} must be {forms[modality]} or a file (bytes or a Path), got "
        f"{type(given).__name__}",
        where,
    )


def _stacked(given: Any) -> Any:
    """The array of a video whose frames are in a list, as arrays or images of Pillow's."""

    def is_frame(each: Any) -> bool:
        return hasattr(each, "convert") or len(getattr(each, "shape", ())) == 3

    if not isinstance(given, (list, tuple)) or not given or not all(map(is_frame, given)):
        return given
    import numpy as np

    frames = [
        np.asarray(each.convert("RGB") if hasattr(each, "convert") else each) for each in given
    ]
    return np.stack(frames) if len({each.shape for each in frames}) == 1 else given


def _read_path(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{where}: {error}", where) from error


def _video_facts(given: Any, num_frames: int, where: str) -> dict[str, Any]:
    """The metadata of a video given as frames: fps, and which frames of how many these are."""
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: the metadata must be a dictionary, got {given!r:.80}", where)
    facts: dict[str, Any] = {}
    if (fps := given.get("fps")) is not None:
        if not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
            raise InputError(
                f"{where}: fps must be above 0 and at most 1000, got {fps!r:.80}", where
            )
        facts["fps"] = float(fps)
    if (numbers := given.get("frames_indices")) is not None:
        numbers = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)
        right = len(numbers) == num_frames and all(type(each) is int for each in numbers)
        if not right or numbers != sorted(numbers) or not 0 <= numbers[0] <= numbers[-1] < 2**31:
            raise InputError(
                f"{where}: frames_indices must be {num_frames} ascending integers, got "
                f"{numbers!r:.80}",
                where,
            )
        facts["frames_indices"] = numbers
    if (total := given.get("total_num_frames")) is not None:
        last = facts.get("frames_indices", [num_frames - 1])[-1]
        if type(total) is not int or not last < total < 2**31:
            raise InputError(
                f"{where}: total_num_frames must be an integer above {last}, got {total!r:.80}",
                where,
            )
        facts["total_num_frames"] = total
    return facts


def embeds_content(
    array: Any, modality: Modality, where: str, facts: Mapping[str, Any], uuid: str | None = None
) -> MediaContent:
    """Embeddings [rows, width] in place of an item. Refuses numbers that are not finite."""
    import numpy as np

    array = np.asarray(array)
    if array.ndim != 2 or array.dtype.kind != "f" or array.itemsize > 4 or not array.size:
        raise InputError(
            f"{where} must be an array [rows, width] of 16 or 32-bit floats, got "
            f"{array.dtype} {list(array.shape)}",
            where,
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{where} must be finite, got NaN or infinity", where)
    kept: dict[str, Any] = {}
    if (grid := facts.get(name := f"{modality}_grid_thw")) is not None:
        kept["grid_thw"] = _grid(grid, name, where)
    if modality == "video":
        kept |= _video_facts({"fps": facts.get("fps")}, 1, where)
    return MediaContent(
        modality=modality, where=where, data=array.tobytes(), shape=array.shape, is_embeds=True,
        facts=kept, uuid=uuid,
    )  # fmt: skip


def _grid(given: Any, name: str, where: str) -> list[int]:
    grid = given.tolist() if hasattr(given, "tolist") else given
    while isinstance(grid, (list, tuple)) and len(grid) == 1:
        grid = grid[0]
    is_grid = isinstance(grid, (list, tuple)) and len(grid) == 3
    if not is_grid or not all(type(each) is int and 0 < each < 2**16 for each in grid):
        raise InputError(
            f"{where}: {name} must be three positive integers, got {given!r:.80}", where
        )
    return list(grid)


def read_embeds(
    encoded: object, modality: Modality, where: str, part: Mapping[str, Any]
) -> MediaContent:
    """Embeddings in a content part: a .npy file in base64."""
    import numpy as np

    if isinstance(encoded, Mapping):
        part, encoded = encoded, encoded.get(f"{modality}_embeds")
    try:
        if not isinstance(encoded, str):
            raise ValueError(f"got {encoded!r:.40}")
        file = io.BytesIO(base64.b64decode(encoded, validate=True))
        form: Any = np.lib.format
        newer = form.read_magic(file) >= (2, 0)
        read_header = form.read_array_header_2_0 if newer else form.read_array_header_1_0
        shape, is_fortran, dtype = read_header(file)
        if is_fortran or dtype.hasobject:
            raise ValueError("it must be in C order, without objects")
        array = np.frombuffer(file.read(), dtype).reshape(shape)  # before memory is taken for it
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise InputError(f"{where} must be a .npy file in base64: {error}", where) from error
    return embeds_content(array, modality, where, part, check_uuid(part.get("uuid"), where))
