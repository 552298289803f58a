"""Decodes video files. Runs in confined processes: the files are untrusted.

Only the frames that the model gets are kept, at the size that it gets them. The decoder begins at
the key frame before each of them, so a long video costs little more than a short one.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.media.decode import BadMedia

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

Frame = npt.NDArray[np.uint8]  # [height, width, 3]

# Others, such as playlists, may name further files.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,flv,ogg,asf"
MAX_FRAME_PIXELS = 8192 * 4320
MAX_SECONDS = 3600
MAX_PACKETS = 500_000  # frames in the file, about
MAX_FRAMES = 768  # of those that are sampled
DEFAULT_NUM_FRAMES = 32


@dataclass(frozen=True)
class Sampling:
    """How many frames are taken. None: as many as the other says."""

    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 1
    from_middles: bool = False  # one frame from the middle of each of equal parts

    @staticmethod
    def of(options: Mapping[str, Any], default: Sampling) -> Sampling:
        """As a request or the operator says (-1: no limit), else `default`."""
        if "num_frames" not in options and "fps" not in options:
            return default
        num_frames, fps = options.get("num_frames", -1), options.get("fps", -1)
        return Sampling(
            None if num_frames == -1 else num_frames,
            None if fps == -1 else fps,
            from_middles=default.from_middles,
        )

    def numbers(self, num_total: int, fps: float) -> list[int]:
        """The numbers of the frames to take, evenly over the video."""
        count = num_total
        if self.fps is not None:
            count = max(int(num_total / fps * self.fps), self.min_frames)
        if self.num_frames is not None:
            count = min(count, self.num_frames)
        count = max(1, min(count, num_total, MAX_FRAMES))
        if self.from_middles:
            return [int((index + 0.5) * num_total / count) for index in range(count)]
        return [int(each) for each in np.linspace(0, num_total - 1, count).round()]


@dataclass(frozen=True)
class Video:
    """Sampled frames and what the file tells about them."""

    frames: list[Any]  # what `keep` made of them
    numbers: list[int]  # which frames of the file they are
    num_total: int
    fps: float | None
    height: int
    width: int
    grid: tuple[int, ...] | None = None  # of patches, if there are embeddings and no frames

    @property
    def duration(self) -> float | None:
        return None if self.fps is None else self.num_total / self.fps


def decode_video(
    data: bytes,
    sampling: Sampling,
    recovers: bool,
    keep: Callable[[Frame, int], Any],
) -> Video:
    """Decode a file. `keep` is called with each sampled frame and their number.

    Frames that cannot be decoded are left out, or replaced by the next one if it `recovers`.
    """
    import av

    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), options=options, metadata_errors="replace") as container:
            if not container.streams.video:
                raise BadMedia("it has no video stream")
            return _read(container, container.streams.video[0], sampling, recovers, keep)
    except av.error.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise BadMedia(f"it is not a video, or it is broken: {error.strerror}") from error


def video_of(
    data: bytes,
    shape: tuple[int, ...],
    facts: Mapping[str, Any],
    keep: Callable[[Frame, int], Any],
) -> Video:
    """The video of RGB pixels [frames, height, width, 3], all of which are taken."""
    count, height, width, _ = shape
    if not count or count > MAX_FRAMES:
        raise BadMedia(f"it must have 1 to {MAX_FRAMES} frames, got {count}")
    _check_size(width, height)
    frames = [
        keep(frame, count) for frame in np.frombuffer(bytearray(data), np.uint8).reshape(shape)
    ]
    numbers = facts.get("frames_indices", list(range(count)))
    num_total = facts.get("total_num_frames", numbers[-1] + 1)
    return Video(frames, numbers, num_total, facts.get("fps"), height, width)


def _read(
    container: InputContainer,
    stream: VideoStream,
    sampling: Sampling,
    recovers: bool,
    keep: Callable[[Frame, int], Any],
) -> Video:
    if stream.codec_context is None:  # PyAV's types leave it out
        raise BadMedia("its codec is unknown, or it is broken")
    _check_size(stream.codec_context.width, stream.codec_context.height)
    stream.codec_context.thread_count = 1
    times, keys = _scan(container, stream)
    num_total = len(times)
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if fps <= 0 or not np.isfinite(fps):
        raise BadMedia("its frame rate is unknown")
    if num_total / fps > MAX_SECONDS:
        raise BadMedia(f"it is longer than {MAX_SECONDS} s: send a part of it")
    wanted = sampling.numbers(num_total, fps)
    frames: list[Any] = []
    numbers: list[int] = []
    size = (0, 0)
    for number, frame in _decode(container, stream, times, keys, wanted, recovers):
        pixels = _rgb(frame)
        if not frames:
            size = (pixels.shape[0], pixels.shape[1])
        if pixels.shape[:2] != size:
            raise BadMedia("its frames have different sizes")
        frames.append(keep(pixels, len(wanted)))
        numbers.append(number)
    if not frames:
        raise BadMedia("none of its frames can be decoded")
    return Video(frames, numbers, num_total, fps, *size)


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise BadMedia("its frames have no size")
    if width * height > MAX_FRAME_PIXELS:
        raise BadMedia(
            f"its frames have {width} x {height} pixels, but at most {MAX_FRAME_PIXELS} are "
            "allowed: send a smaller one"
        )


Keys = list[tuple[int, int]]  # of each key frame: its time, and the time to seek for it


def _scan(container: InputContainer, stream: VideoStream) -> tuple[list[int], Keys]:
    """The times of all frames, and the key frames, in order. Decodes nothing."""
    import av

    times: list[int] = []
    keys: Keys = []
    try:
        for packet in container.demux(stream):
            time = packet.pts if packet.pts is not None else packet.dts
            if not packet.size or time is None or packet.is_discard:
                continue
            times.append(time)
            if packet.is_keyframe:
                keys.append((time, time if packet.dts is None else min(time, packet.dts)))
            if len(times) > MAX_PACKETS:
                raise BadMedia(f"it has more than {MAX_PACKETS} frames: send a part of it")
    except av.error.InvalidDataError:
        pass  # what comes before is whole
    if not times:
        raise BadMedia("it has no frames")
    return sorted(set(times)), sorted(set(keys))


def _decode(
    container: InputContainer,
    stream: VideoStream,
    times: list[int],
    keys: Keys,
    wanted: Sequence[int],
    recovers: bool,
) -> Iterator[tuple[int, VideoFrame]]:
    """The wanted frames and their numbers."""

    keys = keys or [(times[0], times[0])]

    def start(number: int) -> int:
        return max(bisect_right(keys, times[number], key=lambda key: key[0]) - 1, 0)

    for key, group in groupby(wanted, start):
        container.seek(keys[key][1], stream=stream)
        yield from _match(_frames(container, stream), times, list(group), recovers)


def _match(
    frames: Iterator[VideoFrame], times: list[int], wanted: list[int], recovers: bool
) -> Iterator[tuple[int, VideoFrame]]:
    last = None
    for frame in frames:
        time = frame.pts if frame.pts is not None else frame.dts
        if time is None:
            continue
        number, last = bisect_right(times, time) - 1, frame
        while wanted and wanted[0] <= number:
            if wanted[0] == number or recovers:
                yield wanted[0], frame
            wanted.pop(0)
        if not wanted:
            return
    if recovers and last is not None:
        yield from ((number, last) for number in wanted)


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Frames from here on, apart from those that are broken."""
    import av

    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
            if packet is None:
                return
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        yield from frames


def _rgb(frame: VideoFrame) -> Frame:
    """A frame's pixels, turned upright."""
    _check_size(frame.width, frame.height)
    pixels: Frame = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
