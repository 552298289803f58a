"""Processors in the place of those of transformers that need torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs, ProcessorMixin

Array = np.ndarray[Any, Any]


class PixtralProcessor(ProcessorMixin):
    """An image becomes rows of placeholders. A token ends each row, another one the image."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **ignored: Any,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            image_processor, tokenizer, chat_template=chat_template
        )
        self.row = patch_size * spatial_merge_size  # pixels
        self.image_token = image_token
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        return super()._process_images(images, **{**kwargs, "patch_size": self.row})

    def replace_image_token(
        self, image_inputs: Mapping[str, Any], image_idx: int, **kwargs: Any
    ) -> str:
        height, width = (int(size) // self.row for size in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width
        return self.image_break_token.join([row] * height) + self.image_end_token


class DualEncoderProcessor(ProcessorMixin):
    """Of models that take a text or an image. An image is one placeholder: the end of a text."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **ignored: Any) -> None:
        super().__init__(image_processor, tokenizer)  # type: ignore[no-untyped-call]
        self.image_token = tokenizer.eos_token

    def replace_image_token(self, *ignored: Any, **kwargs: Any) -> str:
        return str(self.image_token)


class Llama4ImageKwargs(ImagesKwargs, total=False):
    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessor(PilBackend):
    """Tiles of an image, and the whole image in one more tile. Pixels stay in float32."""

    valid_kwargs = Llama4ImageKwargs
    resample = PILImageResampling.BILINEAR
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    size = {"height": 336, "width": 336}  # of a tile
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    max_patches = 16  # tiles
    resize_to_max_canvas = False
    model_input_names = ["pixel_values"]

    def _preprocess(  # type: ignore[override]
        self,
        images: list[Array],
        size: SizeDict,
        max_patches: int,
        resize_to_max_canvas: bool,
        return_tensors: Any = None,
        **settings: Any,
    ) -> BatchFeature:
        side = size.height
        if side is None or side != size.width:
            raise ValueError(
                f"tiles must be squares (size in preprocessor_config.json), got {size}"
            )
        tiles: list[Array] = []
        ratios: list[tuple[int, int]] = []
        for image in images:
            height, width = image.shape[-2:]
            rows, columns = best_canvas(height, width, side, max_patches, resize_to_max_canvas)
            ratios.append((rows, columns))
            room = (rows * side, columns * side)
            if not resize_to_max_canvas:  # small images are not enlarged beyond a tile
                room = (min(max(height, side), room[0]), min(max(width, side), room[1]))
            resized = self._tile(image, fit(height, width, *room), **settings)
            # Black, after the pixels are normalized.
            mean, std = (
                np.reshape(settings[f"image_{name}"], (3, 1, 1)) for name in ("mean", "std")
            )
            canvas = np.empty((3, rows * side, columns * side), resized.dtype)
            canvas[:] = -mean / std if settings["do_normalize"] else 0.0
            canvas[:, : resized.shape[1], : resized.shape[2]] = resized
            cut = canvas.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            tiles.extend(cut.reshape(-1, 3, side, side))
            if rows * columns > 1:
                tiles.append(self._tile(image, (side, side), **settings))
        data = {"pixel_values": np.stack(tiles), "aspect_ratios": ratios}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _tile(self, image: Array, size: tuple[int, int], **settings: Any) -> Array:
        image = self.resize(image, SizeDict(*size), resample=settings["resample"])
        if settings["do_rescale"]:
            image = self.rescale(image, settings["rescale_factor"])
        if settings["do_normalize"]:
            image = self.normalize(image, settings["image_mean"], settings["image_std"])
        return image


def best_canvas(
    height: int, width: int, side: int, max_tiles: int, is_largest: bool
) -> tuple[int, int]:
    """Rows and columns of tiles. The image fits in without much scaling, and with little waste."""
    grids = [(r, c) for r in range(1, max_tiles + 1) for c in range(1, max_tiles // r + 1)]
    scales = [min(c * side / width, r * side / height) for r, c in grids]
    larger = [scale for scale in scales if scale >= 1]
    chosen = max(larger or scales) if is_largest or not larger else min(larger)
    fitting = [grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def fit(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """The largest size of this shape."""
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return max(min(int(height * by_width), most_height), 1), most_width
    return most_height, max(min(int(width * by_height), most_width), 1)


OWN: dict[str, Any] = {
    "CLIPProcessor": DualEncoderProcessor,
    "PixtralProcessor": PixtralProcessor,
    "SiglipProcessor": DualEncoderProcessor,
}
OWN_IMAGE_PROCESSORS = {"Llama4Processor": Llama4ImageProcessor}
