"""Processors in the place of those of transformers that need torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.processing_utils import ProcessorMixin


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
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
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
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


OWN = {"PixtralProcessor": PixtralProcessor}
