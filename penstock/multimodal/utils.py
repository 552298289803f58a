"""vLLM's place for helpers with images."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, NoReturn

from PIL import Image, ImageOps

from penstock.config.media import MediaConfig
from penstock.media.decode import to_rgb
from penstock.media.fetch import MediaFetcher
from penstock.protocol.vllm_fields import refuse_class

EVERYWHERE = ["0.0.0.0/0", "::/0"]


def fetch_image(image_url: str) -> Image.Image:
    """The image at a URL, in RGB. The caller is trusted: files and any host are allowed."""
    config = MediaConfig(allowed_local_media_path="/", allowed_media_networks=EVERYWHERE)
    data = MediaFetcher(config).read(image_url, "image_url")
    return to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


def encode_image_base64(image: Image.Image, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    file = io.BytesIO()
    image.convert(image_mode).save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def encode_image_url(image: Image.Image, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """A data URL, for `image_url` in messages."""
    encoded = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{format.lower()};base64,{encoded}"


if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
