"""Tiny random checkpoints of every architecture, made with transformers, and its greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_variants import COMMON, OUTSIDE, UNEVEN_NORMS, VARIANTS

STAND_INS = {"MiMo": "Qwen2"}  # for models that transformers has no code for, but their like


def architecture_of(name: str) -> str:
    """What config.json calls the architecture of a variant with this name."""
    if name.endswith("Images"):
        return f"{name.removesuffix('Images')}ForConditionalGeneration"
    return f"{name}ForCausalLM"


def config_class(name: str) -> Any:
    """transformers' class of the settings of a variant with this name."""
    import transformers

    name = STAND_INS.get(name, name)
    is_text = name in ("Gemma3", "Llama4")  # whose own name is that of images and text
    return getattr(transformers, f"{name.removesuffix('Images')}{'Text' * is_text}Config")


def transformers_config(variant: str, **overrides: Any) -> Any:
    """transformers' settings of the variant."""
    name, settings = (VARIANTS | OUTSIDE)[variant]
    settings = {**COMMON, **settings, **overrides}
    if not name.endswith("Images"):
        return config_class(name)(**settings)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 32, "patch_size": 16}
    outer = {"mm_tokens_per_image": 4} if name == "Gemma3Images" else {}
    return config_class(name)(text_config=settings, vision_config=vision, **outer)


def config_of(variant: str) -> dict[str, Any]:
    """What config.json says of the variant, with every setting that transformers knows."""
    raw: dict[str, Any] = json.loads(transformers_config(variant).to_json_string(use_diff=False))
    return {**raw, "architectures": [architecture_of(VARIANTS[variant][0])]}


def make_checkpoint(folder: Path, variant: str, **overrides: Any) -> Path:
    """Write a random checkpoint of the variant into the folder."""
    import transformers

    name, _ = (VARIANTS | OUTSIDE)[variant]
    config = transformers_config(variant, **overrides)
    torch.manual_seed(7)
    model = getattr(transformers, architecture_of(STAND_INS.get(name, name)))(config).float()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # transformers starts them at zero, which tests nothing
            torch.nn.init.normal_(parameter, std=0.25)
        elif "norm" in parameter_name and name in UNEVEN_NORMS:  # and these at one
            torch.nn.init.normal_(parameter, mean=1.0, std=0.25)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.25)
    model.save_pretrained(folder)
    if name in STAND_INS:
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "architectures": [architecture_of(name)]}))
    return folder


class Reference:
    """transformers' own code on the same weights."""

    def __init__(self, folder: Path | str, **kwargs: Any) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **kwargs
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab]"""
        return self.model(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]

    def count_near_ties(self, prompt: list[int], tokens: list[int], limit: float = 1e-3) -> int:
        """How many tokens are not the likeliest after those before them, if only by so little."""
        logits = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        assert behind.max() < limit, (
            f"token {int(behind.argmax())} is {behind.max():.2e} behind the reference's choice"
        )
        return int((behind > 0).sum())


def save_random(model: Any, folder: Path) -> Any:
    """Fill transformers' model with random weights, save it and return it."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.25)
    model.float().eval().save_pretrained(folder)
    return model
