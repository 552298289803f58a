"""Tiny random LoRA adapters of all flavours, made with peft, and its merged model's tokens.

Adapters change the greedy tokens of the tiny models: their deltas are as large as the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import Reference

MakeCheckpoint = Callable[[str], Path]  # of a variant (fixture `checkpoint_of`)
MakeAdapter = Callable[[str], Path]  # of a flavour (fixture `adapter_of`)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Flavour:
    """A kind of adapter: the tiny model that it is for, and settings of peft's LoraConfig."""

    variant: str
    settings: dict[str, Any] = field(default_factory=dict)


FLAVOURS: dict[str, Flavour] = {
    "all_linear": Flavour("llama", {"target_modules": "all-linear"}),
    "rank_1": Flavour("llama", {"target_modules": "all-linear", "r": 1}),
    "rank_64": Flavour("llama", {"target_modules": "all-linear", "r": 64}),
    "q_and_v": Flavour("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "v_alone": Flavour("qwen2", {"target_modules": ["v_proj"]}),
    "up_alone": Flavour("qwen3", {"target_modules": ["up_proj"]}),
    "rslora": Flavour("llama", {"target_modules": ATTENTION, "use_rslora": True, "r": 16}),
    "dora": Flavour("llama", {"target_modules": "all-linear", "use_dora": True}),
    "dora_biased": Flavour("qwen2", {"target_modules": "all-linear", "use_dora": True}),
    "expression": Flavour("llama", {"target_modules": r".*layers\.[02]\..*(q|down)_proj"}),
    "patterns": Flavour(
        "llama",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 3, r"layers\.1\..*down_proj": 5, "v_pro": 7},
            "alpha_pattern": {r"^model\.layers\.2\.self_attn\.q_proj": 32, "up_proj": 2},
        },
    ),
    "some_layers": Flavour(
        "llama",
        {"target_modules": ATTENTION, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ),
    "excluded": Flavour(
        "llama", {"target_modules": "all-linear", "exclude_modules": ["k_proj", "down_proj"]}
    ),
    "bias_all": Flavour(
        "llama_tied_biased", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}
    ),
    "bias_lora_only": Flavour(
        "llama_tied_biased", {"target_modules": ["v_proj", "up_proj"], "bias": "lora_only"}
    ),
    "lora_bias": Flavour(
        "llama_tied_biased", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}
    ),
    "embedding_and_head": Flavour(
        "llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj", "v_proj"]}
    ),
    "embedding_alone": Flavour("llama", {"target_modules": ["embed_tokens"]}),
    "head_alone": Flavour("llama", {"target_modules": ["lm_head"]}),
    "saved_modules": Flavour(
        "llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "tied_embedding": Flavour(
        "qwen3_tied",
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
    "tied_saved": Flavour(
        "qwen3_tied",
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "trained_tokens": Flavour(
        "llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9, 77]}
    ),
    "fused_layers": Flavour("phi3", {"target_modules": "all-linear"}),
    "fused_dora": Flavour("phi3", {"target_modules": ["qkv_proj"], "use_dora": True}),
    "shared_expert": Flavour("qwen2_moe", {"target_modules": "all-linear"}),
    "stacked_experts": Flavour(
        "qwen3_moe", {"target_modules": ATTENTION, "target_parameters": STACKED}
    ),
    "stacked_down": Flavour(
        "mixtral", {"target_modules": ["q_proj"], "target_parameters": STACKED[1:]}
    ),
    "stacked_gate_up": Flavour(
        "mixtral", {"target_modules": ["q_proj"], "target_parameters": STACKED[:1]}
    ),
    "stacked_transposed": Flavour(
        "gpt_oss",
        {"target_modules": ATTENTION, "target_parameters": [*STACKED, "mlp.router.weight"]},
    ),
}

# A text model inside another. Its tied embedding repeats one token whatever the adapter: compare
# logits instead of tokens.
WRAPPED = Flavour("gemma3_images", {"target_modules": r".*language_model.*(q|v|down)_proj"})

# peft loads experts one by one, as it wrote them before transformers stacked them, but no longer
# writes them: by variant, the name of an expert's matrix in a layer, and the names of the three.
SINGLE_EXPERTS = {
    "qwen3_moe": ("mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
    "minimax_m2": ("block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
}


def make_adapter(
    folder: Path,
    checkpoint: Path,
    seed: int = 0,
    auto: str = "AutoModelForCausalLM",
    **settings: Any,
) -> Path:
    """Write a random adapter for a checkpoint. `settings` are those of peft's LoraConfig."""
    import peft
    import transformers

    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | settings)
    base = getattr(transformers, auto).from_pretrained(checkpoint, dtype=torch.float32)
    peft.get_peft_model(base, config).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    # The base's matrices, which peft stores beside adapters of the embedding, stay.
    for name in sorted(name for name in tensors if not name.endswith("base_layer.weight")):
        tensors[name] = _random_like(name, tensors[name], generator)
    if settings.get("ensure_weight_tying"):
        _tie(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def make_flavour(folder: Path, checkpoint: Path, flavour: str, seed: int = 0) -> Path:
    """Write an adapter of this flavour for a checkpoint of its variant."""
    return make_adapter(folder, checkpoint, seed, **FLAVOURS[flavour].settings)


def make_single_experts(
    folder: Path, checkpoint: Path, variant: str, seed: int = 0, use_dora: bool = False
) -> Path:
    """Write an adapter with a pair of matrices for each of a layer's experts."""
    pattern, names = SINGLE_EXPERTS[variant]
    make_adapter(folder, checkpoint, seed, target_modules=ATTENTION, use_dora=use_dora)
    config = json.loads((checkpoint / "config.json").read_text())
    hidden = config["hidden_size"]
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    count = config.get("num_experts") or config["num_local_experts"]
    tensors = load_file(folder / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        if layer in config.get("mlp_only_layers", []):
            continue
        for expert in range(count):
            for name in names:
                own = f"base_model.model.model.layers.{layer}.{pattern.format(expert, name)}"
                inner, outer = (size, hidden) if name == names[2] else (hidden, size)
                shapes = {"lora_A": (8, inner), "lora_B": (outer, 8)}
                for kind, shape in shapes.items():
                    tensors[f"{own}.{kind}.weight"] = 0.2 * torch.randn(shape, generator=generator)
                if use_dora:
                    magnitude = 1 + torch.rand(outer, generator=generator)
                    tensors[f"{own}.lora_magnitude_vector"] = magnitude
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    edit_config(folder, target_modules=[*ATTENTION, *names])
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class MergedReference(Reference):
    """transformers' code on the weights that peft merged, in float32.

    A tied embedding with an adapter stays unmerged: peft would add the delta twice, for the
    embedding and for the head.
    """

    def __init__(self, checkpoint: Path | str, adapter: Path | str) -> None:
        import peft

        super().__init__(checkpoint)
        wrapped = peft.PeftModel.from_pretrained(self.model, adapter)
        is_tied = self.model.config.tie_word_embeddings
        if is_tied and any("lora_embedding_A" in name for name, _ in wrapped.named_parameters()):
            self.model = wrapped.eval()
        else:
            self.model = wrapped.merge_and_unload(safe_merge=True).eval()


def reference_tokens(
    reference: Reference, prompts: Sequence[Any], num_tokens: int = 16
) -> list[list[int]]:
    """So many most likely tokens after each of the prompts, like `tiny_engine.greedy_tokens`."""
    return [_greedy(reference, prompt["prompt_token_ids"], num_tokens) for prompt in prompts]


def _greedy(reference: Reference, prompt: list[int], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.append(int(reference.logits([*prompt, *tokens])[-1].argmax()))
    return tokens


def _random_like(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("lora_magnitude_vector"):  # about the norms of the rows, as peft initializes
        return tensor * (1 + 0.3 * noise)
    return (0.25 if re.search(r"lora_(A|B|embedding_A|embedding_B)", name) is None else 0.2) * noise


def _tie(tensors: dict[str, torch.Tensor]) -> None:
    """Give the head the embedding's weights, as training with tied weights would."""
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    if f"{embedding}.weight" in tensors:
        tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"].clone()
        return
    tensors[f"{head}.lora_A.weight"] = tensors[f"{embedding}.lora_embedding_B"].T.contiguous()
    tensors[f"{head}.lora_B.weight"] = tensors[f"{embedding}.lora_embedding_A"].T.contiguous()
