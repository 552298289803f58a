"""Videos: which frames are taken of a file, what broken and hostile files do, and their pixels."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import clip
from video_clips import levels, video_file

from penstock.media import video as video_module
from penstock.media.content import read_multi_modal_data
from penstock.media.decode import BadMedia
from penstock.media.video import DEFAULT_NUM_FRAMES, Sampling, Video, decode_video, video_of
from penstock.media.video_processor import (
    FixedVideos,
    GlmVideos,
    InternVideos,
    Qwen3Videos,
    QwenVideos,
    SmolVideos,
)
from penstock.protocol.errors import InputError

NAMES: dict[Any, str] = {  # in transformers
    QwenVideos: "Qwen2VL", Qwen3Videos: "Qwen3VL", SmolVideos: "SmolVLM", GlmVideos: "Glm4v",
    InternVideos: "InternVL", FixedVideos: "LlavaOnevision",
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mp4 with B-frames": {"codec": "libx264", "gop_size": 5, "max_b_frames": 3},
    "matroska": {"kind": "matroska", "codec": "libx264", "gop_size": 8, "max_b_frames": 2},
    "webm": {"kind": "webm", "codec": "libvpx"},
    "avi": {"kind": "avi", "codec": "mjpeg"},
    "mpegts": {"kind": "mpegts", "codec": "mpeg2video", "fps": 25},
    "gif": {"kind": "gif", "codec": "gif"},
}
ALL = Sampling()


def decoded(data: bytes, sampling: Sampling = ALL, recovers: bool = False) -> Video:
    return decode_video(data, sampling, recovers, lambda frame, _: frame.transpose(2, 0, 1))


@pytest.mark.parametrize("name", FILES)
def test_the_sampled_frames_are_those_of_their_numbers(name: str) -> None:
    data = video_file(24, **FILES[name])
    for sampling, count in ((ALL, 24), (Sampling(num_frames=5), 5), (Sampling(num_frames=1), 1)):
        found = decoded(data, sampling)
        assert levels(found.frames) == found.numbers
        assert len(found.numbers) == count
        assert (found.num_total, found.width, found.height) == (24, 64, 48)
        assert found.fps == FILES[name].get("fps", 10)


def test_frames_are_sampled_evenly_by_count_or_by_time() -> None:
    assert Sampling(num_frames=5).numbers(101, 10.0) == [0, 25, 50, 75, 100]
    assert len(Sampling(fps=2).numbers(100, 10.0)) == 20
    assert len(Sampling(fps=2, min_frames=4).numbers(10, 10.0)) == 4
    assert len(Sampling(fps=2, num_frames=6).numbers(100, 10.0)) == 6
    assert Sampling(num_frames=50).numbers(3, 10.0) == [0, 1, 2]
    assert len(ALL.numbers(10**5, 10.0)) == video_module.MAX_FRAMES
    default = QwenVideos({}).sampling
    assert Sampling.of({}, default) == Sampling(num_frames=DEFAULT_NUM_FRAMES, min_frames=4)
    assert Sampling.of({"fps": 2}, default) == Sampling(fps=2)
    assert Sampling.of({"num_frames": -1}, default) == ALL
    assert GlmVideos({}).sampling == Sampling(num_frames=600, fps=2)
    middles = Sampling.of({"num_frames": 4}, InternVideos({}).sampling)
    assert middles.numbers(100, 10.0) == [12, 37, 62, 87]
    assert middles.numbers(3, 10.0) == [0, 1, 2]


def test_a_size_that_the_model_cannot_take_is_refused() -> None:
    tiles = InternVideos({"size": {"height": 448, "width": 448}})
    assert tiles.with_kwargs({"max_patches": 6}).settings == tiles.settings
    with pytest.raises(BadMedia, match=r"448.*leave size out of mm_processor_kwargs"):
        tiles.with_kwargs({"size": {"height": 56, "width": 56}})


@pytest.mark.parametrize("name", ["avi", "matroska"])
def test_broken_frames_are_left_out_or_replaced(name: str) -> None:
    data = bytearray(video_file(24, **FILES[name]))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        broken = packets[10]
        number = sorted(packet.dts if packet.pts is None else packet.pts for packet in packets)
        at = number.index(broken.dts if broken.pts is None else broken.pts)
        assert broken.pos is not None
        span = slice(broken.pos + 4, broken.pos + broken.size)
    data[span] = bytes((7 * i) % 256 for i in range(span.stop - span.start))
    left = [each for each in range(24) if each != at]
    assert decoded(bytes(data)).numbers == left
    recovered = decoded(bytes(data), recovers=True)
    assert recovered.numbers == list(range(24))
    assert levels(recovered.frames) == [each + (each == at) for each in range(24)]


def test_a_cut_file_gives_the_frames_that_are_whole() -> None:
    data = video_file(24, **FILES["webm"])
    found = decoded(data[: len(data) * 2 // 3])
    assert 0 < len(found.numbers) < 24
    assert levels(found.frames) == found.numbers


def test_a_file_may_be_cut_anywhere() -> None:
    """Such as before the name of its codec. It is refused, or its frames are whole."""
    data = video_file(4)
    for length in range(len(data)):
        with contextlib.suppress(BadMedia):
            assert decoded(data[:length]).num_total == 4


def turned(data: bytes) -> bytes:
    """An MP4 file that says: turn me by 90 degrees."""
    at = data.index(b"tkhd") + 44
    one, minus = (0x10000).to_bytes(4, "big"), (2**32 - 0x10000).to_bytes(4, "big")
    zero = bytes(4)
    matrix = [zero, one, zero, minus, zero, zero, zero, zero, (2**30).to_bytes(4, "big")]
    return data[:at] + b"".join(matrix) + data[at + 36 :]


def test_frames_are_turned_upright() -> None:
    """The upper quarter of the stored frames is white: players turn it to the right."""
    found = decoded(turned(video_file(2)))
    assert (found.width, found.height) == (48, 64)
    assert found.frames[0][:, :, -4:].mean() > 240
    assert found.frames[0][:, :, :4].mean() < 20


def playlist(target: str) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{target}\n#EXT-X-ENDLIST\n".encode()


@pytest.mark.parametrize("kind", ["hls", "concat", "text", "empty", "audio", "no index", "sdp"])
def test_what_is_no_video_is_refused_and_names_no_other_file(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(video_file(4))
    data = {
        "hls": playlist(f"file://{secret}"),
        "concat": f"ffconcat version 1.0\nfile '{secret}'\n".encode(),
        "text": b"hello " * 1000,
        "empty": b"",
        "audio": b"OggS" + bytes(100),
        "no index": video_file(4)[:500],
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    }[kind]
    with pytest.raises(BadMedia, match=r"not a video|no video stream|no frames"):
        decoded(data)


@pytest.mark.parametrize(
    ("name", "most", "says"),
    [
        ("MAX_FRAME_PIXELS", 64 * 48 - 1, "64 x 48 pixels"),
        ("MAX_SECONDS", 2, "longer than 2 s"),
        ("MAX_PACKETS", 23, "more than 23 frames"),
    ],
)
def test_limits_are_checked_before_a_frame_is_decoded(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int, says: str
) -> None:
    monkeypatch.setattr(video_module, name, most)
    monkeypatch.setattr(video_module, "_decode", None)
    with pytest.raises(BadMedia, match=says):
        decoded(video_file(24))


def test_frames_that_are_too_many_pixels_are_refused() -> None:
    frames = np.zeros((700, 28, 28, 3), np.uint8)
    big = QwenVideos({"min_pixels": 28 * 28 * 256})
    with pytest.raises(BadMedia, match="700 frames of 448 x 448 pixels"):
        video_of(frames.tobytes(), frames.shape, {}, big.keep)


# -- pixels


@pytest.mark.parametrize("shape", [(100, 60), (30, 200), (64, 64)])
def test_patches_are_those_of_the_image_processor(shape: tuple[int, int]) -> None:
    """Frame by frame, apart from the rounding of Pillow's resizing."""
    from transformers import Qwen2VLImageProcessorPil

    settings = {"min_pixels": 28 * 28 * 6, "max_pixels": 28 * 28 * 20, "image_std": [0.2, 0.3, 0.4]}
    frames = [
        np.asarray(Image.fromarray(each).resize(shape, Image.Resampling.BICUBIC))
        for each in clip(4, 4, 3)
    ]
    own = QwenVideos(settings)
    found = own.tensors([own.keep(frame.copy(), 3) for frame in frames])
    patches = found["pixel_values_videos"].reshape(2, -1, 3, 2, 14 * 14)
    processor = Qwen2VLImageProcessorPil(**settings)
    for index, frame in enumerate([*frames, frames[-1]]):
        image = processor(Image.fromarray(frame), return_tensors="pt")
        assert image["image_grid_thw"][0].tolist()[1:] == found["video_grid_thw"][0].tolist()[1:]
        theirs = image["pixel_values"].reshape(-1, 3, 2, 14 * 14)[:, :, 0]
        assert (patches[index // 2, :, :, index % 2] - theirs).abs().max() < 2.5 / 255 / 0.2


@pytest.mark.slow  # it needs torchvision, of which PyPI has no CPU build
@pytest.mark.parametrize("shape", [(5, 60, 80), (4, 20, 500), (2, 333, 207)])
def test_pixels_equal_those_of_transformers(shape: tuple[int, ...]) -> None:
    pytest.importorskip("torchvision")
    import transformers

    frames = clip(shape[2], shape[1], shape[0])
    video = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}
    for own_class, settings in (
        (QwenVideos, {}),
        (QwenVideos, {"min_pixels": 3136, "max_pixels": 100_000}),
        (Qwen3Videos, {}),
        (Qwen3Videos, {"size": {"shortest_edge": 4096, "longest_edge": 150_000}}),
        (SmolVideos, {"video_sampling": video, "size": {"longest_edge": 999}}),
        (GlmVideos, {}),
        (GlmVideos, {"size": {"shortest_edge": 4096, "longest_edge": 150_000}}),
        (InternVideos, {"size": {"height": 448, "width": 448}}),
        (FixedVideos, {"image_mean": [0.5, 0.5, 0.5]}),
    ):
        name = NAMES[own_class]
        theirs = getattr(transformers, f"{name}VideoProcessor")(**settings, do_sample_frames=False)
        expected = theirs(videos=[frames], return_tensors="pt")
        own = own_class(settings)
        found = own.tensors(video_of(frames.tobytes(), frames.shape, {}, own.keep).frames)
        for key, value in found.items():
            assert torch.equal(value, expected[key]), (name, key)


# -- the Python API


def test_frames_may_come_in_several_forms(tmp_path: Path) -> None:
    frames = clip(8, 6, 3)
    images = [Image.fromarray(frame) for frame in frames]
    (tmp_path / "a.mp4").write_bytes(video_file(2))
    forms: list[Any] = [
        frames,
        torch.from_numpy(frames),
        list(frames),
        images,
        [frames],
        (frames, {}),
    ]
    for form in forms:
        (content,) = read_multi_modal_data({"video": form})
        assert (content.data, content.shape) == (frames.tobytes(), (3, 6, 8, 3))
    two = read_multi_modal_data({"video": [(frames, {"fps": 2}), frames]})
    assert [content.facts for content in two] == [{"fps": 2.0}, {}]
    (content,) = read_multi_modal_data({"video": tmp_path / "a.mp4"})
    assert (content.data, content.shape) == ((tmp_path / "a.mp4").read_bytes(), None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((3, 6, 8, 3), np.float32), "uint8"),
        (np.zeros((6, 8, 3), np.uint8), "uint8"),
        ([np.zeros((6, 8, 3), np.uint8), np.zeros((5, 8, 3), np.uint8)], "uint8"),
        (Path("/nowhere/a.mp4"), "No such file"),
        ((np.zeros((3, 6, 8, 3), np.uint8), 5), "dictionary"),
        ((np.zeros((3, 6, 8, 3), np.uint8), {"fps": 0}), "fps"),
        ((np.zeros((3, 6, 8, 3), np.uint8), {"frames_indices": [0, 1]}), "3 ascending"),
        ((np.zeros((3, 6, 8, 3), np.uint8), {"frames_indices": [2, 1, 0]}), "3 ascending"),
        ((np.zeros((3, 6, 8, 3), np.uint8), {"total_num_frames": 2}), "above 2"),
    ],
)  # fmt: skip
def test_wrong_videos_are_refused(given: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_multi_modal_data({"video": given})
