"""Decodes image files. Runs in confined processes: the files are untrusted."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
WHITE = (255, 255, 255)
MAX_FRAMES = 1000  # of an animation


class BadMedia(Exception):
    """What is wrong with a file, for its sender."""


def image_of(data: bytes, shape: tuple[int, ...], max_pixels: int) -> Image.Image:
    """The image of RGB pixels [height, width, 3]."""
    height, width, _ = shape
    _check_pixels(width, height, max_pixels)
    return Image.frombytes("RGB", (width, height), data)


def decode_image(data: bytes, max_pixels: int, options: Mapping[str, Any]) -> Image.Image:
    """The image in RGB, turned upright. Of an animation, its first frame."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            Image.MAX_IMAGE_PIXELS = max_pixels
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(*image.size, max_pixels)
            _check_frames(image)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), options)
    except (BadMedia, MemoryError):
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadMedia(f"it has more than {max_pixels} pixels: send a smaller one") from error
    except UnidentifiedImageError as error:
        raise BadMedia(f"it is not an image: send {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise anything for files that are made to break them
        raise BadMedia(f"it is broken: {error}"[:200]) from error


def _check_frames(image: Image.Image) -> None:
    if getattr(image, "is_animated", False) and getattr(image, "n_frames", 1) > MAX_FRAMES:
        raise BadMedia(f"it is an animation of more than {MAX_FRAMES} frames: send one frame")


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
