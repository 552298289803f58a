"""Images and videos that are sent with a message of a terminal conversation."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

from penstock.protocol.errors import InputError


def attachment(source: str) -> dict[str, Any]:
    """The content part of an image or a video: a file, whose name says which, or a URL."""
    kind, _ = mimetypes.guess_type(source.partition("?")[0])
    modality = "video" if (kind or "").startswith("video/") else "image"
    url = source
    if not source.startswith(("http://", "https://", "data:")):
        try:
            data = Path(source).expanduser().read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {source}: {error.strerror}", "image") from error
        url = f"data:{kind or 'image/png'};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}
