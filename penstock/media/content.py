"""Media as users give them, before they are decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.errors import InputError
from penstock.protocol.media import Modality

MAX_BYTES = 64 * 2**20  # of an encoded file


@dataclass(frozen=True)
class MediaContent:
    """An item of a prompt, undecoded."""

    modality: Modality
    data: bytes = field(repr=False)
    where: str  # the field that it came from
    size: tuple[int, int] | None = None  # of RGB pixels, if `data` is not a file
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the processor

    def digest(self, kind: str) -> bytes:
        """Covers the content and how it is processed; `kind` covers the processor."""
        head = repr((self.modality, self.size, sorted(self.kwargs.items()), kind))
        return hashlib.sha256(head.encode() + b"\0" + self.data).digest()


def read_data_url(url: str, where: str) -> bytes:
    """The bytes of a data URL."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InputError(
            f"{where} must be a data URL in base64, such as data:image/png;base64,..., got "
            f"{url!r:.60}",
            where,
        )
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(f"{where} must have at most {MAX_BYTES // 2**20} MiB", where)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where} is not valid base64: {error}", where) from error


def read_multi_modal_data(
    data: object, kwargs: object = None, where: str = "multi_modal_data"
) -> list[MediaContent]:
    """The `multi_modal_data` of a prompt: {"image": an image, or a list of them}.

    An image is one of Pillow's, an array [height, width, 3] of uint8, or the bytes of a file.
    """
    if not isinstance(data, Mapping):
        raise InputError(f'{where} must be {{"image": ...}}, got {data!r:.80}', where)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"mm_processor_kwargs must be a dictionary, got {kwargs!r:.80}", "mm_processor_kwargs"
        )
    found = []
    for modality, given in data.items():
        if modality != "image":
            raise InputError(f"{where} may contain image, got {modality!r}", where)
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        for index, one in enumerate(given if is_list else [given]):
            at = f"{where}.{modality}[{index}]" if is_list else f"{where}.{modality}"
            found.append(read_image(one, at, dict(kwargs or {})))
    return found


def read_image(given: Any, where: str, kwargs: Mapping[str, Any] | None = None) -> MediaContent:
    """An image of the Python API."""
    kwargs = kwargs or {}
    if isinstance(given, (bytes, bytearray)):
        return MediaContent("image", bytes(given), where, kwargs=kwargs)
    if hasattr(given, "convert") and hasattr(given, "tobytes"):  # Pillow's
        from penstock.media.decode import to_rgb

        rgb = to_rgb(given)
        return MediaContent("image", rgb.tobytes(), where, rgb.size, kwargs)
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) == 3 and shape[2] == 3 and str(given.dtype) == "uint8":
        return MediaContent("image", given.tobytes(), where, (shape[1], shape[0]), kwargs)
    raise InputError(
        f"{where} must be an image of Pillow's, an array [height, width, 3] of uint8 or the bytes "
        f"of a file, got {type(given).__name__}",
        where,
    )
