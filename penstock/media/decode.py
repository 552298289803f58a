"""Decodes image files. Runs in confined processes: the files are untrusted."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
WHITE = (255, 255, 255)


class BadMedia(Exception):
    """What is wrong with a file, for its sender."""


def decode_image(
    data: bytes, size: tuple[int, int] | None, max_pixels: int, options: Mapping[str, Any]
) -> Image.Image:
    """The image in RGB, turned upright. Of an animation, its first frame.

    `size`: `data` is not a file but the RGB pixels of an image of this size.
    """
    if size is not None:
        _check_pixels(*size, max_pixels)
        return Image.frombytes("RGB", size, data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            Image.MAX_IMAGE_PIXELS = max_pixels
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(*image.size, max_pixels)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), options)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadMedia(f"it has more than {max_pixels} pixels: send a smaller one") from error
    except UnidentifiedImageError as error:
        raise BadMedia(f"it is not an image: send {', '.join(FORMATS)}") from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError) as error:
        raise BadMedia(f"it is broken: {error}"[:200]) from error


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise BadMedia(
            f"it has {width} x {height} pixels, but at most {most} are allowed: send a smaller one"
        )


def to_rgb(image: Image.Image, options: Mapping[str, Any] | None = None) -> Image.Image:
    """RGB, with transparent pixels on a background."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = image.point(lambda value: value / 256 if image.mode != "F" else value).convert("L")
    if image.mode == "RGBA" or "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        colour = tuple((options or {}).get("rgba_background_color", WHITE))
        background = Image.new("RGBA", image.size, (*colour[:3], 255))
        image = Image.alpha_composite(background, image)
    return image if image.mode == "RGB" else image.convert("RGB")
