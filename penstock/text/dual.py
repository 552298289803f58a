"""Inputs of dual encoders: a text's tokens as its tower takes them, or the place of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.protocol.errors import InputError
from penstock.protocol.pooling import DualInputs
from penstock.text.frontend import Frontend

if TYPE_CHECKING:
    from penstock.media.content import MediaContent


def place_image(
    frontend: Frontend, prompt: str | Sequence[int], media: Sequence[MediaContent], field: str
) -> list[int]:
    """The prompt of an image. Refuses more than one image, and one beside a text."""
    if len(prompt) > 0 or len(media) > 1:
        count = "an image" if len(media) == 1 else f"{len(media)} images"
        raise InputError(
            f"an input of this model is a text or one image, got {count}"
            f"{' and a text' if len(prompt) > 0 else ''}: send each as an input of its own",
            field,
        )
    if frontend.media is None:
        raise InputError(
            f"{media[0].where}: the vision tower of this model is not loaded", media[0].where
        )
    frontend.media.token_of(media[0].modality, media[0].where)
    return [frontend.media.info().image_token_id]


def finish_text(
    frontend: Frontend, dual: DualInputs, token_ids: list[int], field: str
) -> list[int]:
    """A text's tokens, cut behind the one whose vector is the text's, or padded in front of it."""
    if not dual.num_tokens:
        end = max(token_ids, default=-1) if dual.end_token_id is None else dual.end_token_id
        if end not in token_ids:
            raise InputError(
                f"{field} must contain the token that ends a text, {end}: leave "
                "add_special_tokens on, or add it",
                field,
            )
        return token_ids[: token_ids.index(end) + 1]
    num_missing = dual.num_tokens - len(token_ids)
    if num_missing <= 0:
        return token_ids
    pad = None if frontend.tokenizer is None else frontend.tokenizer.pad_token_id
    if pad is None:
        raise InputError(
            f"{field} must have {dual.num_tokens} tokens, got {len(token_ids)}: this model pads "
            "texts, and its tokenizer names no padding token",
            field,
        )
    padding = [pad] * num_missing
    return [*padding, *token_ids] if dual.pads_left else [*token_ids, *padding]
