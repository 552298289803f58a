"""Random images and videos for the requests of a server benchmark, with vLLM's flags."""

from __future__ import annotations

import argparse
import ast
import base64
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.cli.bench.prompts import BenchRequest
from penstock.protocol.errors import ConfigError

Size = tuple[int, int, int]  # height, width, frames; one frame is an image
DEFAULT_SIZES: dict[Size, float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}
MAX_PIXELS = 2**30  # of an item, all frames
FPS = 2


@dataclass(frozen=True)
class MediaMix:
    """How many items a request has, and of which sizes."""

    num_items: int = 1
    ratio: float = 0.0  # num_items is drawn from (1 - ratio) to (1 + ratio) times itself
    limits: Mapping[str, int] | None = None  # items of a modality in a request
    sizes: Mapping[Size, float] | None = None  # and how often they are drawn

    def draw(self, rng: random.Random) -> list[Size]:
        """The sizes of a request's items."""
        sizes = {size: share for size, share in (self.sizes or DEFAULT_SIZES).items() if share}
        left = dict(self.limits or {})
        low, high = (round(self.num_items * (1 + sign * self.ratio)) for sign in (-1, 1))
        drawn: list[Size] = []
        for _ in range(rng.randint(low, high)):
            open_sizes = [size for size in sizes if left.get(_modality(size), 1) > 0]
            if not open_sizes:
                break
            (size,) = rng.choices(open_sizes, [sizes[each] for each in open_sizes])
            drawn.append(size)
            if (modality := _modality(size)) in left:
                left[modality] -= 1
        return drawn


def _modality(size: Size) -> str:
    return "image" if size[2] == 1 else "video"


def mix_of(args: argparse.Namespace) -> MediaMix:
    given = {
        "num_items": args.random_mm_base_items_per_request,
        "ratio": args.random_mm_num_mm_items_range_ratio,
        "limits": args.random_mm_limit_mm_per_prompt,
        "sizes": args.random_mm_bucket_config,
    }
    return MediaMix(**{name: value for name, value in given.items() if value is not None})


def with_media(requests: Sequence[BenchRequest], mix: MediaMix, seed: int) -> list[BenchRequest]:
    """The requests, each with random items of its own before its text."""
    rng = random.Random(f"media {seed}")
    return [
        replace(request, media=tuple(_part(size, rng) for size in mix.draw(rng)))
        for request in requests
    ]


def _part(size: Size, rng: random.Random) -> dict[str, Any]:
    """A content part of chat completions."""
    modality = _modality(size)
    try:
        data = _image(size, rng) if modality == "image" else _video(size, rng)
    except ImportError as error:
        raise ConfigError(
            f"random images and videos need {error.name}: pip install 'penstock[vision]'"
        ) from error
    kind = {"image": "image/jpeg", "video": "video/mp4"}[modality]
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def _image(size: Size, rng: random.Random) -> bytes:
    from PIL import Image

    height, width, _ = size
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(height * width * 3)).save(file, "JPEG")
    return file.getvalue()


def _video(size: Size, rng: random.Random) -> bytes:
    import av
    import numpy as np

    height, width, num_frames = size
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for _ in range(num_frames):
            pixels = np.frombuffer(rng.randbytes(height * width * 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels.reshape(height, width, 3), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def bucket_config(text: str) -> dict[Size, float]:
    """Read `{(height, width, frames): share}`."""
    form = "must be like {(256, 256, 1): 0.5, (720, 1280, 16): 0.5}"
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{form}, got {text:.80}") from error
    if not isinstance(given, dict) or not given:
        raise argparse.ArgumentTypeError(f"{form}, got {text:.80}")
    for size, share in given.items():
        is_size = isinstance(size, tuple) and len(size) == 3
        if not is_size or not all(type(each) is int and each > 0 for each in size):
            raise argparse.ArgumentTypeError(f"{form}: a size is three positive integers: {size!r}")
        if size[0] * size[1] * size[2] > MAX_PIXELS:
            raise argparse.ArgumentTypeError(f"{size!r} is more than {MAX_PIXELS} pixels")
        if not isinstance(share, (int, float)) or not 0 <= share < float("inf"):
            raise argparse.ArgumentTypeError(f"{form}: a share is a number from 0 on: {share!r}")
    if not any(given.values()):
        raise argparse.ArgumentTypeError(f"{form}: one share must be above 0")
    return given


def media_limits(text: str) -> dict[str, int]:
    """Read `{"image": 3, "video": 0}`."""
    form = 'must be like {"image": 3, "video": 1}'
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{form}, got {text:.80}") from error
    is_right = isinstance(given, dict) and set(given) <= {"image", "video"}
    if not is_right or not all(type(each) is int and each >= 0 for each in given.values()):
        raise argparse.ArgumentTypeError(f"{form}, got {text:.80}")
    return dict(given)
