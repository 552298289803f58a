"""Makes small video files whose frames are known by their brightness."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np

STEP = 8  # of brightness between frames


def video_file(
    num_frames: int = 24,
    kind: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (64, 48),
    fps: int = 10,
    **options: Any,
) -> bytes:
    """Each frame is STEP brighter than the one before."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = {"png": "rgb24", "gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for name, value in options.items():
            setattr(stream.codec_context, name, value)
        for number in range(num_frames):
            level = np.full((size[1], size[0], 3), number * STEP % 256, np.uint8)
            level[: size[1] // 4] = 255  # the upper quarter is white
            frame = av.VideoFrame.from_ndarray(level, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    return file.getvalue()


def levels(frames: list[Any]) -> list[int]:
    """The numbers of frames [3, height, width], by their brightness below."""
    return [round(float(np.asarray(frame)[:, -8:].mean()) / STEP) for frame in frames]
