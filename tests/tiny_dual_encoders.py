"""Tiny random checkpoints of dual encoders, with a tokenizer and an image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
SIZE = {"height": 56, "width": 56}
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
    "crop_size": SIZE,
}  # fmt: skip
SIGLIP_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "size": SIZE, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip
NUM_SPECIAL = 4  # <s>, </s>, <pad>, <unk>

# By variant: transformers' class, outer settings, those of texts and of images, the processor's,
# and the tokenizer's.
Settings = dict[str, Any]
VARIANTS: dict[str, tuple[str, Settings, Settings, Settings, Settings, Settings]] = {
    "clip": (
        "CLIP",
        {"projection_dim": 40},
        {"eos_token_id": 1, "projection_dim": 8},
        {"projection_dim": 8},
        CLIP_PROCESSOR,
        {},
    ),
    "clip_old": (
        "CLIP",
        {"projection_dim": 72},  # more than the text tower's rows have
        {"eos_token_id": 2, "hidden_act": "gelu"},
        {"hidden_act": "gelu"},
        CLIP_PROCESSOR,
        {},
    ),
    "siglip": ("Siglip", {}, {"projection_size": 64}, {}, SIGLIP_PROCESSOR, {}),
    "siglip2": (
        "Siglip",
        {},
        {"hidden_size": 64},
        {},
        SIGLIP_PROCESSOR,
        {"padding_side": "left", "do_lower_case": True},
    ),
}


def make_tokenizer(folder: Path, settings: Settings) -> None:
    """A tokenizer of single bytes, with a token behind each text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<pad>", "<unk>", *alphabet]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:4]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "<pad>", "unk_token": "<unk>", **settings,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def make_dual_encoder(folder: Path, variant: str) -> Any:
    """Write a random checkpoint into the folder; transformers' model of it."""
    import transformers

    name, outer, text, vision, processor, tokenizer = VARIANTS[variant]
    text = {**TEXT, "vocab_size": NUM_SPECIAL + 256, **text}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**VISION, **vision}, **outer
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}Model")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    make_tokenizer(folder, tokenizer)
    settings = {**processor, "processor_class": f"{name}Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


class Reference:
    """The vectors of transformers' model, normalized."""

    def __init__(self, folder: Path, variant: str, model: Any) -> None:
        from transformers import AutoImageProcessor, PreTrainedTokenizerFast

        self.model, self.settings = model, VARIANTS[variant][5]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        load: Any = AutoImageProcessor.from_pretrained
        self.images = load(folder, backend="pil")
        self.pads = VARIANTS[variant][0] == "Siglip"

    @torch.inference_mode()
    def text(self, given: str | list[int]) -> torch.Tensor:
        if isinstance(given, str):
            text = given.lower() if self.settings.get("do_lower_case") else given
            padding: Any = {"padding": "max_length", "max_length": 32} if self.pads else {}
            given = self.tokenizer(text, **padding)["input_ids"]
        return self._normalized(self.model.get_text_features(torch.tensor([given])))

    @torch.inference_mode()
    def image(self, image: Any) -> torch.Tensor:
        pixels = self.images([image], return_tensors="pt")["pixel_values"]
        return self._normalized(self.model.get_image_features(pixels))

    def _normalized(self, output: Any) -> torch.Tensor:
        return torch.nn.functional.normalize(output.pooler_output[0], dim=-1)
