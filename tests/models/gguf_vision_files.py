"""GGUF files of small vision-language checkpoints, as llama.cpp's converters would make them.

The language model is one file, the vision tower and its projector are another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_builder import add_value
from gguf_conversions import Tensors, add_one_to_norms, permute_heads
from gguf_twin_files import write_twin
from gguf_twins import EXPERT_KEYS, GEMMA_KEYS, Twin
from safetensors.numpy import load_file, save_file

Config = dict[str, Any]
Convert = Callable[[Tensors, Config], Tensors]
TEXT = re.compile(r"^(model\.text_model|model\.language_model|language_model\.model|model)\.(?!v)")


@dataclass(frozen=True)
class VisionTwin:
    """Of a variant in vision_variants."""

    text: Twin  # its variant is not read
    projector: str
    keys: dict[str, str]  # metadata by the name in vision_config
    conversions: tuple[Convert, ...]  # of the tower's tensors
    metadata: Callable[[Config, Config], dict[str, Any]]  # of config.json and the processor's
    text_conversion: Convert = field(default=lambda tensors, config: tensors)


def write_files(folder: Path, checkpoint: Path, twin: VisionTwin, quantize: str = "F32") -> Path:
    """Write both files; `quantize` is a type for the tower's matrices. Returns the model's."""
    folder.mkdir(parents=True)
    config = json.loads((checkpoint / "config.json").read_text())
    tensors: Tensors = load_file(checkpoint / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if is_text(name)}
    _write_text(folder, checkpoint, twin, config, text)
    for convert in twin.conversions:
        tensors = convert(tensors, config)
    tower = {name: tensor for name, tensor in tensors.items() if not is_text(name)}
    _write_tower(folder / "mmproj-F32.gguf", checkpoint, twin, config, tower, quantize)
    return folder / "model.gguf"


def is_text(name: str) -> bool:
    is_projector = re.match(r"(model\.)?(connector|multi_modal)", name) is not None
    return "lm_head" in name or (TEXT.match(name) is not None and not is_projector)


def _write_text(
    folder: Path, checkpoint: Path, twin: VisionTwin, config: Config, tensors: Tensors
) -> None:
    text = folder / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps(config["text_config"]))
    renamed = {
        TEXT.sub("model.", name).replace("language_model.lm_head", "lm_head"): tensor
        for name, tensor in twin.text_conversion(tensors, config).items()
    }
    save_file(renamed, text / "model.safetensors")
    rope = config["text_config"].get("rope_parameters") or {}
    metadata = _tokenizer(checkpoint)
    if "mrope_section" in rope:
        key = f"{twin.text.architecture}.rope.dimension_sections"
        metadata[key] = [*rope["mrope_section"][:3], 0]
    write_twin(folder / "model.gguf", text, twin.text, metadata)


def _tokenizer(checkpoint: Path) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": ids["<s>"],
        "tokenizer.ggml.eos_token_id": ids["</s>"],
        "tokenizer.ggml.padding_token_id": ids["<pad>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def _write_tower(
    path: Path,
    checkpoint: Path,
    twin: VisionTwin,
    config: Config,
    tensors: Tensors,
    quantize: str,
) -> None:
    vision = config["vision_config"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", twin.projector)
    values: dict[str, Any] = {
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_mean": [float(each) for each in processor.get("image_mean", [0.5] * 3)],
        "clip.vision.image_std": [float(each) for each in processor.get("image_std", [0.5] * 3)],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        **{f"clip.vision.{key}": vision[name] for name, key in twin.keys.items()},
        **twin.metadata(config, processor),
    }
    for key, value in values.items():
        add_value(writer, key, value)
    depth = values["clip.vision.block_count"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 4))  # also of mm.{n}
    kind = gguf.GGMLQuantizationType[quantize]
    for name, tensor in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        data = np.ascontiguousarray(tensor)
        own_name = own or name
        assert own_name.startswith(("v.", "mm.")), name
        is_matrix = data.ndim == 2 and "position" not in own_name and "norm" not in own_name
        if is_matrix and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(own_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renaming(*pairs: tuple[str, str]) -> Convert:
    """Names that the gguf package's tables know."""

    def convert(tensors: Tensors, config: Config) -> Tensors:
        made: Tensors = {}
        for name, tensor in tensors.items():
            for pattern, replacement in pairs:
                name = re.sub(pattern, replacement, name)
            made[name] = tensor
        return made

    return convert


def split_frames(tensors: Tensors, config: Config) -> Tensors:
    """The filter of two frames as two filters."""
    made = dict(tensors)
    both = made.pop("visual.patch_embed.proj.weight")
    made["v.patch_embd.weight"], made["v.patch_embd.weight.1"] = both[:, :, 0], both[:, :, 1]
    return made


def add_no_positions(tensors: Tensors, config: Config) -> Tensors:
    """As the first converter did."""
    return {**tensors, "v.position_embd.weight": np.zeros((10, 10), np.float32)}


def split_qkv(tensors: Tensors, config: Config) -> Tensors:
    made: Tensors = {}
    for name, tensor in tensors.items():
        if ".qkv." not in name:
            made[name] = tensor
            continue
        for part, rows in zip("qkv", np.split(tensor, 3), strict=True):
            made[name.replace("qkv", part)] = rows
    return made


def rename_deepstack(tensors: Tensors, config: Config) -> Tensors:
    """Named by their layers; the merger's names become those of Qwen2-VL."""
    layers = config["vision_config"]["deepstack_visual_indexes"]
    made: Tensors = {}
    for name, tensor in tensors.items():
        found = re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(.*)", name)
        if found:
            name = f"v.deepstack.{layers[int(found.group(1))]}.{found.group(2)}"
        name = name.replace("visual.merger.linear_fc1", "mm.0")
        name = name.replace("visual.merger.linear_fc2", "mm.2")
        made[name.replace("visual.merger.norm", "v.post_ln")] = tensor
    return made


def permute_tower(tensors: Tensors, config: Config) -> Tensors:
    heads = config["vision_config"]["num_attention_heads"]
    both = {"num_attention_heads": heads, "num_key_value_heads": heads}
    tower = {name: tensor for name, tensor in tensors.items() if "vision_tower" in name}
    return {**tensors, **permute_heads(tower, both)}


def add_one_to_projector(tensors: Tensors, config: Config) -> Tensors:
    return {
        name: tensor + 1 if "soft_emb_norm" in name else tensor for name, tensor in tensors.items()
    }


def take_break(tensors: Tensors, config: Config) -> Tensors:
    """A copy of a token's embedding, which only llama.cpp needs."""
    embeddings = tensors["language_model.model.embed_tokens.weight"]
    return {**tensors, "v.token_embd.img_break": embeddings[4]}


def without_head(tensors: Tensors, config: Config) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".head." not in name}


def rename_internvl(tensors: Tensors, config: Config) -> Tensors:
    made: Tensors = {}
    numbers = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    for name, tensor in tensors.items():
        stem, _, rest = name.partition(".")
        if stem == "multi_modal_projector":
            part, _, ending = rest.partition(".")
            name = f"mlp1.{numbers[part]}.{ending}"
        elif stem == "vision_tower":
            is_bare = "lambda_" in name or "position_embeddings" in name
            name = f"model.{name}" + (".weight" if is_bare else "")
        made[name] = tensor
    return made


def split_stacked_experts(tensors: Tensors, config: Config) -> Tensors:
    """Gate and up of experts apart."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = map(np.ascontiguousarray, np.split(tensor, 2, axis=1))
            made[f"{stem}gate_proj.weight"], made[f"{stem}up_proj.weight"] = gate, up
        else:
            made[name + ".weight" if name.endswith("experts.down_proj") else name] = tensor
    return made


VIT_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
QWEN_KEYS = {
    "hidden_size": "embedding_length",
    "depth": "block_count",
    "num_heads": "attention.head_count",
    "patch_size": "patch_size",
}
VIT_NAMES = renaming((r"^vision_tower\.", "vision_tower.vision_model."))
VISUAL = renaming((r"^model\.visual\.", "visual."))


def _sizes(processor: Config) -> dict[str, Any]:
    """Not in the files of Qwen's published models, which share them."""
    return {
        "clip.vision.image_min_pixels": processor["min_pixels"],
        "clip.vision.image_max_pixels": processor["max_pixels"],
    }


def _gemma3(config: Config, processor: Config) -> dict[str, Any]:
    return {"clip.use_gelu": True, "clip.vision.projector.scale_factor": 2}


def _idefics3(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_image_size": processor["size"]["longest_edge"],
    }


def _qwen2(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.vision.feed_forward_length": config["vision_config"]["hidden_size"],
        "clip.vision.image_size": 560,
        **_sizes(processor),
    }


def _qwen25(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_silu": True,
        "clip.vision.n_wa_pattern": config["vision_config"]["fullatt_block_indexes"][0] + 1,
        "clip.vision.window_size": config["vision_config"]["window_size"],
        "clip.vision.image_size": 560,
        **_sizes(processor),
    }


def _qwen3(config: Config, processor: Config) -> dict[str, Any]:
    vision = config["vision_config"]
    layers = vision["deepstack_visual_indexes"]
    return {
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": 2,
        "clip.vision.is_deepstack_layers": [each in layers for each in range(vision["depth"])],
        "clip.vision.image_size": int(vision["num_position_embeddings"] ** 0.5) * 14,
        **_sizes(processor),
    }


def _pixtral(config: Config, processor: Config) -> dict[str, Any]:
    act = "clip.use_silu" if config["vision_config"]["hidden_act"] == "silu" else "clip.use_gelu"
    merge = {"clip.vision.spatial_merge_size": 2} if config["model_type"] == "mistral3" else {}
    return {act: True, **merge}


def _internvl(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_max_tiles": processor["max_patches"],
        "clip.vision.image_size": 56,
        "clip.vision.patch_size": 14,
        "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _qwen_text(architecture: str, **keys: str) -> Twin:
    return Twin(architecture, "", keys=keys)


_LLAMA = Twin("llama", "", conversions=(permute_heads,))
_MISTRAL3 = Twin("mistral3", "", conversions=(permute_heads,))
_INTERN_KEYS = {key: name for key, name in VIT_KEYS.items() if not key.endswith("_size")}
_INTERN_KEYS |= {key: VIT_KEYS[key] for key in ("hidden_size", "intermediate_size")}
_INTERNVL = (rename_internvl,)
VISION_TWINS: dict[str, VisionTwin] = {
    "gemma3": VisionTwin(
        Twin(
            "gemma3",
            "",
            keys=GEMMA_KEYS,
            conversions=(add_one_to_norms,),
            metadata={"attention.sliding_window_pattern": 2},
        ),
        "gemma3",
        VIT_KEYS,
        (
            without_head,
            add_one_to_projector,
            VIT_NAMES,
            renaming((r"mm_input_projection_weight", "mm_input_projection.weight")),
        ),
        _gemma3,
    ),
    "idefics3": VisionTwin(_LLAMA, "idefics3", VIT_KEYS, (), _idefics3),
    "smolvlm": VisionTwin(_LLAMA, "idefics3", VIT_KEYS, (), _idefics3),
    "qwen2_vl": VisionTwin(
        _qwen_text("qwen2vl"),
        "qwen2vl_merger",
        {**QWEN_KEYS, "embed_dim": "embedding_length"},
        (VISUAL, split_frames, split_qkv, add_no_positions),
        _qwen2,
    ),
    "qwen2_5_vl": VisionTwin(
        _qwen_text("qwen2vl"),
        "qwen2.5vl_merger",
        {**QWEN_KEYS, "intermediate_size": "feed_forward_length"},
        (VISUAL, split_frames, split_qkv),
        _qwen25,
    ),
    "qwen3_vl": VisionTwin(
        _qwen_text("qwen3vl"),
        "qwen3vl_merger",
        {**QWEN_KEYS, "intermediate_size": "feed_forward_length"},
        (VISUAL, split_frames, rename_deepstack),
        _qwen3,
    ),
    "qwen3_vl_moe": VisionTwin(
        _qwen_text("qwen3vlmoe", **EXPERT_KEYS),
        "qwen3vl_merger",
        {**QWEN_KEYS, "intermediate_size": "feed_forward_length"},
        (VISUAL, split_frames, rename_deepstack),
        _qwen3,
        split_stacked_experts,
    ),
    "pixtral": VisionTwin(_LLAMA, "pixtral", VIT_KEYS, (take_break, permute_tower), _pixtral),
    "mistral3": VisionTwin(_MISTRAL3, "pixtral", VIT_KEYS, (take_break, permute_tower), _pixtral),
    "internvl": VisionTwin(Twin("qwen2", ""), "internvl", _INTERN_KEYS, _INTERNVL, _internvl),
    "internvl_normed": VisionTwin(
        Twin("qwen3", ""), "internvl", _INTERN_KEYS, _INTERNVL, _internvl
    ),
}
