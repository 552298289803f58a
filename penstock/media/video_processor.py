"""Turns sampled frames into a model's input, as transformers' video processors do, to the bit.

Those need torchvision, whose builds fit one build of torch each. The resizing is the same: torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from penstock.media.decode import BadMedia
from penstock.media.video import DEFAULT_NUM_FRAMES, Frame, Sampling, Video

MAX_PIXELS = 64 * 2**20  # of all frames, resized
LANCZOS = 1  # Pillow's number of the filter
HAS_LANCZOS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


class VideoProcessor:
    """Stands for the part of transformers' processors that takes videos.

    `settings` are those of the checkpoint. Those of a request are given with a video.
    """

    defaults: ClassVar[Mapping[str, Any]]
    rows_are_of_images: ClassVar[bool] = False  # a video's placeholders are those of images

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = self._merged(self.defaults, settings)
        for name, value in self.settings.items():
            setattr(self, name, value)  # processors read some of them

    def _merged(self, default: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with their pixels in `size`, whatever they are called."""
        known = {key: value for key, value in given.items() if value is not None}
        merged = {**default, **{key: value for key, value in known.items() if key in default}}
        names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        edges = {name: known[key] for key, name in names.items() if key in known}
        merged["size"] = {**default["size"], **known.get("size", {}), **edges}
        if not all(type(edge) is int and edge > 0 for edge in merged["size"].values()):
            raise BadMedia(f"its size must be positive integers, got {merged['size']!r:.80}")
        return merged

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> VideoProcessor:
        """This with the settings of a request."""
        own = {**kwargs, **kwargs.get("videos_kwargs", {})}
        changed = type(self)(self.settings)
        changed.settings = self._merged(
            self.settings,
            {key: own[key] for key in ("size", "min_pixels", "max_pixels") if key in own},
        )
        return changed

    @property
    def sampling(self) -> Sampling:
        """Which frames are taken unless a request says it."""
        num_frames, fps = self.settings["num_frames"], self.settings["fps"]
        if num_frames is None and fps is None:
            num_frames = DEFAULT_NUM_FRAMES
        return Sampling(num_frames, fps, self.settings["min_frames"])

    def keep(self, frame: Frame, num_frames: int) -> torch.Tensor:
        """A sampled frame in its size, [3, height, width] of uint8."""
        pixels = torch.from_numpy(frame).permute(2, 0, 1).contiguous()
        for size in self.sizes(num_frames, frame.shape[0], frame.shape[1]):
            if num_frames * math.prod(size) > MAX_PIXELS:
                raise BadMedia(
                    f"its {num_frames} frames of {size[1]} x {size[0]} pixels have more than "
                    f"{MAX_PIXELS}: take fewer (media_io_kwargs) or smaller ones "
                    "(mm_processor_kwargs)"
                )
            if pixels.shape[1:] != size:
                is_lanczos = HAS_LANCZOS and self.settings["resample"] == LANCZOS
                mode = "lanczos" if is_lanczos else "bicubic"
                pixels = F.interpolate(pixels[None], size, mode=mode, antialias=True)[0]
        return pixels

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        """The heights and widths to which frames are resized, one after the other."""
        raise NotImplementedError

    def normalized(self, frames: list[torch.Tensor]) -> torch.Tensor:
        """[frames, 3, height, width] of float32."""
        scale = 1.0 / self.settings["rescale_factor"]
        mean, std = (
            (torch.tensor(self.settings[name]) * scale)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        return torch.stack(frames).float().sub_(mean).div_(std)

    def __call__(self, videos: list[torch.Tensor], video: Video) -> dict[str, Any]:
        """What transformers' class returns for the one video."""
        from transformers.video_utils import VideoMetadata

        metadata = VideoMetadata(
            total_num_frames=video.num_total,
            fps=video.fps,
            height=video.height,
            width=video.width,
            duration=video.duration,
            frames_indices=list(video.numbers),
        )
        if video.grid is None:
            return {**self.tensors(video.frames), "video_metadata": [metadata]}
        return {"video_grid_thw": torch.tensor([video.grid]), "video_metadata": [metadata]}

    def tensors(self, frames: list[torch.Tensor]) -> dict[str, Any]:
        raise NotImplementedError


class QwenVideos(VideoProcessor):
    """Qwen2-VL and Qwen2.5-VL: patches of two frames each, in squares of `merge_size`."""

    defaults = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "rescale_factor": 1 / 255, "resample": 3,
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "num_frames": None, "fps": None, "min_frames": 4,
    }  # fmt: skip
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        return [self.fit(1, height, width)]

    def fit(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Whole squares of patches, as near to the shape of the frames as `size` allows."""
        factor = self.patch_size * self.merge_size
        if max(height, width) > 200 * min(height, width):
            raise BadMedia(f"its frames of {width} x {height} pixels are longer than 200 : 1")
        least, most = (self.settings["size"][key] for key in ("shortest_edge", "longest_edge"))
        fitted = [round(side / factor) * factor for side in (height, width)]
        rounded = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        area = math.prod(fitted) * (rounded if num_frames > 1 else 1)
        if area > most:
            ratio = math.sqrt(num_frames * height * width / most)
            fitted = [
                max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width)
            ]
        elif area < least:
            ratio = math.sqrt(least / (num_frames * height * width))
            fitted = [math.ceil(side * ratio / factor) * factor for side in (height, width)]
        return fitted[0], fitted[1]

    def embedded(self, grid: list[int], fps: float | None) -> Video:
        """The video of embeddings. `fps`: frames a second, of those that were sampled."""
        t, h, w = grid
        count = t * self.temporal_patch_size
        height, width = h * self.patch_size, w * self.patch_size
        return Video([], list(range(count)), count, fps, height, width, (t, h, w))

    def tensors(self, frames: list[torch.Tensor]) -> dict[str, Any]:
        time, patch, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        frames = [*frames, *[frames[-1]] * (-len(frames) % time)]
        x = self.normalized(frames)
        t, h, w = len(x) // time, x.shape[2] // patch, x.shape[3] // patch
        x = x.reshape(t, time, 3, h // merge, merge, patch, w // merge, merge, patch)
        x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)
        grid = torch.tensor([[t, h, w]])
        return {"pixel_values_videos": x, "video_grid_thw": grid}


class Qwen3Videos(QwenVideos):
    """Qwen3-VL: `size` bounds the pixels of all frames together."""

    defaults = {
        **QwenVideos.defaults,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": HALF, "image_std": HALF, "patch_size": 16, "fps": 2,
    }  # fmt: skip

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        factor = self.patch_size * self.merge_size
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return [self.fit(max(num_frames, self.temporal_patch_size), height, width)]


class SmolVideos(VideoProcessor):
    """SmolVLM: each frame is an image of one tile."""

    defaults = {
        "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364},
        "image_mean": HALF, "image_std": HALF, "rescale_factor": 1 / 255, "resample": LANCZOS,
        "num_frames": 64, "fps": 1, "min_frames": 1,
    }  # fmt: skip

    def __init__(self, settings: Mapping[str, Any]) -> None:
        sampling = settings.get("video_sampling") or {}
        names = {"max_frames": "num_frames", "fps": "fps", "video_size": "size"}
        own = {names[key]: value for key, value in sampling.items() if key in names}
        super().__init__({**settings, **own})

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        longest, side = (self.settings[key]["longest_edge"] for key in ("size", "max_image_size"))
        longest = min(longest, 4096)
        ratio = width / height
        if width >= height:
            first = (int(longest / ratio), longest)
            first = (first[0] + first[0] % 2, longest)
        else:
            first = (longest, int(longest * ratio))
            first = (longest, first[1] + first[1] % 2)
        return [(max(first[0], 1), max(first[1], 1)), (side, side)]

    def tensors(self, frames: list[torch.Tensor]) -> dict[str, Any]:
        return {"pixel_values": self.normalized(frames)[None]}


class GlmVideos(Qwen3Videos):
    """GLM-4.1V and GLM-4.5V: the time of each two frames is after their patches."""

    defaults = {
        **QwenVideos.defaults,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        "fps": 2, "max_duration": 300, "min_frames": 1,
    }  # fmt: skip
    rows_are_of_images = True

    @property
    def sampling(self) -> Sampling:
        fps = self.settings["fps"]
        return Sampling(int(self.settings["max_duration"] * fps), fps)


class FixedVideos(VideoProcessor):
    """LLaVA-OneVision: each frame has the size of a tile."""

    defaults = {
        "size": {"height": 384, "width": 384},
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "rescale_factor": 1 / 255, "resample": 3,
        "num_frames": None, "fps": None, "min_frames": 1,
    }  # fmt: skip

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> VideoProcessor:
        changed = super().with_kwargs(kwargs)
        if (size := changed.settings["size"]) != self.settings["size"]:
            raise BadMedia(
                f"the model takes frames of {self.settings['size']} only, got {size}: leave size "
                "out of mm_processor_kwargs"
            )
        return changed

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        return [(self.settings["size"]["height"], self.settings["size"]["width"])]

    def tensors(self, frames: list[torch.Tensor]) -> dict[str, Any]:
        return {"pixel_values_videos": self.normalized(frames)[None]}


class InternVideos(FixedVideos):
    """InternVL: each frame is a tile, with its number before it."""

    defaults = {**FixedVideos.defaults, "initial_shift": True}
    rows_are_of_images = True

    @property
    def sampling(self) -> Sampling:
        is_centred = self.settings["initial_shift"] is True
        return replace(super().sampling, from_middles=is_centred)


VIDEO_PROCESSORS: dict[str, type[VideoProcessor]] = {  # by transformers' class of the processor
    "Qwen2VLProcessor": QwenVideos,
    "Qwen2_5_VLProcessor": QwenVideos,
    "Qwen3VLProcessor": Qwen3Videos,
    "SmolVLMProcessor": SmolVideos,
    "Glm4vProcessor": GlmVideos,
    "InternVLProcessor": InternVideos,
    "LlavaOnevisionProcessor": FixedVideos,
}
