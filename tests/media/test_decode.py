"""Files of images become upright RGB pixels, whatever their mode."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile_media import long_animation, png
from PIL import Image
from tiny_vision import picture

from penstock.media.decode import BadMedia, decode_image

MOST = 10_000  # pixels
RED, GREEN, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (255, 255, 255), (0, 0, 0)
Pixels = np.ndarray[Any, Any]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, **options: Any) -> Pixels:
    image = decode_image(data, MOST, options)
    assert image.mode == "RGB"
    return np.asarray(image)


def one_pixel(image: Image.Image, kind: str = "PNG", **options: Any) -> tuple[int, ...]:
    """The colour of a file whose pixels are all the same."""
    found = decoded(saved(image, kind), **options)
    assert (found == found[0, 0]).all()
    return tuple(found[0, 0].tolist())


UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {  # by EXIF's orientation: stored to shown
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_is_turned_upright(orientation: int, kind: str) -> None:
    image = picture(7, 4)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {}
    plain = decoded(saved(image, kind, **lossless))
    turned = decoded(saved(image, kind, exif=exif, **lossless))
    assert np.array_equal(turned, UPRIGHT[orientation](plain))


def test_transparent_pixels_get_the_background() -> None:
    half = Image.new("RGBA", (3, 2), (*RED, 128))
    assert one_pixel(half) == (255, 127, 127)
    assert one_pixel(half, rgba_background_color=[0, 0, 255]) == (128, 0, 127)
    clear = Image.new("RGBA", (3, 2), (*RED, 0))
    assert one_pixel(clear) == WHITE
    assert one_pixel(clear, "WEBP", rgba_background_color=GREEN) == GREEN
    assert one_pixel(Image.new("LA", (3, 2), (10, 0))) == WHITE


def test_palettes_have_their_colours_and_their_transparent_one() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((1, 0), 1)
    assert decoded(saved(image, "PNG")).tolist() == [[list(RED), list(GREEN)]]
    for kind in ("PNG", "GIF"):
        clear = decoded(saved(image, kind, transparency=1))
        assert clear.tolist() == [[list(RED), list(WHITE)]]


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, WHITE),
        ("1", 0, BLACK),
        ("I;16", 0x8000, (128, 128, 128)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
    ],
)
def test_grey_levels_become_rgb(mode: str, value: Any, expected: tuple[int, ...]) -> None:
    assert one_pixel(Image.new(mode, (3, 2), value)) == expected


def test_inks_become_rgb() -> None:
    """CMYK in TIFF, and in a JPEG of Adobe's, whose values are inverted."""
    for inks, expected in (
        ((0, 0, 0, 0), WHITE),
        ((0, 255, 255, 0), RED),
        ((255, 0, 255, 0), GREEN),
        ((0, 0, 0, 255), BLACK),
    ):
        image = Image.new("CMYK", (16, 16), inks)
        assert one_pixel(image, "TIFF") == expected
        found = np.array(one_pixel(image, "JPEG"))
        assert np.abs(found - expected).max() <= 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_counts(kind: str) -> None:
    first, *others = (Image.new("RGB", (4, 3), colour) for colour in (RED, GREEN, BLACK))
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=others, **lossless)
    found = decoded(data)
    assert found.shape == (3, 4, 3)
    assert (found == RED).all()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (png(101, 100), "more than 10000 pixels"),
        (long_animation(), "more than 1000 frames"),
        (b"GIF87a", "not an image|broken"),
        (b"<svg/>", "not an image"),
    ],
    ids=["too large", "too long", "cut", "svg"],
)
def test_what_cannot_be_taken_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(BadMedia, match=says):
        decoded(data)
