"""Tiny random vision-language checkpoints with a tokenizer, a processor and a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vision_variants import VARIANTS, Variant

from penstock.media.messages import MediaSetup
from penstock.media.processor import load_processor
from penstock.media.video import video_of
from penstock.media.worker import make_worker

SPECIAL = [
    "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' %}VIDEO"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


def make_tokenizer(folder: Path, variant: Variant) -> dict[str, int]:
    """Write a tokenizer of single bytes and special tokens. Returns the ids of the latter."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*SPECIAL, *variant.special]
    tokens = [*special, *alphabet]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("IMAGE", variant.image).replace("VIDEO", variant.video)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "<pad>", "chat_template": template,
        "extra_special_tokens": variant.named or special[3:],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {token: i for i, token in enumerate(special)}


def make_vision_checkpoint(folder: Path, name: str) -> Path:
    """Write a random checkpoint of a variant into the folder."""
    import transformers

    variant = VARIANTS[name]
    ids = make_tokenizer(folder, variant)
    model_class = getattr(transformers, variant.model)
    text = {
        **TEXT, "vocab_size": len(ids) + 256, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 2, **variant.text,
    }  # fmt: skip
    outer = {
        key: ids.get(value, value) if isinstance(value, str) else value
        for key, value in variant.outer.items()
    } or {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    config = model_class.config_class(text_config=text, vision_config=variant.vision, **outer)
    torch.manual_seed(7)
    model = model_class(config).float()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(variant.processor))
    if variant.own:
        (folder / "processor_config.json").write_text(json.dumps(variant.own))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A colourful image."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def clip(width: int, height: int, num_frames: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """The frames of a video, [num_frames, height, width, 3]."""
    frames = [np.asarray(picture(width, height, seed + number)) for number in range(num_frames)]
    return np.stack(frames)


class _GivenVideos:
    """A processor's part for videos, which takes frames and their metadata."""

    def __init__(self, own: Any, facts: list[dict[str, Any]]) -> None:
        self.own, self.facts = own, iter(facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, videos: list[np.ndarray[Any, Any]], **kwargs: Any) -> Any:
        (frames,) = videos
        video = video_of(frames.tobytes(), frames.shape, next(self.facts), self.own.keep)
        return self.own(videos, video)


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        import transformers

        self.variant = VARIANTS[name]
        model_class = getattr(transformers, self.variant.model)
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # all tokens that are asked for
        self.processor = load_processor(str(folder))

    def generate(
        self, text: str, images: list[Any], max_tokens: int
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens and the greedy ones after it."""
        prompt_ids, token_ids, _ = self.generate_scored(text, images, max_tokens)
        return prompt_ids, token_ids

    @torch.inference_mode()
    def generate_scored(
        self, text: str, images: list[Any], max_tokens: int, video: Any = None
    ) -> tuple[list[int], list[int], list[float]]:
        """As `generate`, and the logprob of each token. `video`: frames and their metadata."""
        given: dict[str, Any] = {"images": images or None}
        if video is not None:
            given["videos"] = [video[0]]
            own = self.processor.video_processor
            self.processor.video_processor = _GivenVideos(own, [video[1]])
        if images or video is not None or not self.variant.needs_image:
            inputs = self.processor(text=[text], **given, return_tensors="pt")
        else:  # tokens see no later ones
            inputs = self.processor.tokenizer([text], return_tensors="pt")
            inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
        if video is not None:
            self.processor.video_processor = own
        output = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        num_prompt = inputs["input_ids"].shape[1]
        token_ids = output.sequences[0].tolist()
        logprobs = [
            float(step[0].float().log_softmax(-1)[token])
            for step, token in zip(output.logits, token_ids[num_prompt:], strict=True)
        ]
        return token_ids[:num_prompt], token_ids[num_prompt:], logprobs


class InProcessMedia:
    """Stands in for the pool of confined processes, whose start takes seconds."""

    def __init__(self, model: Path | bytes) -> None:
        """`model`: a checkpoint's folder, or the setup of its processes."""
        is_folder = isinstance(model, Path)
        self._setup = msgspec.json.encode(MediaSetup(str(model))) if is_folder else model
        self._work: Callable[[bytes], bytes] | None = None

    def submit(self, payload: bytes, tenant: str = "") -> InProcessMedia:
        if self._work is None:
            self._work = make_worker(self._setup)
        self._answer = self._work(payload)
        return self

    def result(self) -> bytes:
        return self._answer

    def close(self) -> None:
        pass
