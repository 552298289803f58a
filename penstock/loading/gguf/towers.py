"""The table of supported vision towers, by `clip.projector_type`.

Files omit what all published models of a kind share, such as the limits of an image's size: those
settings are here.
"""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.qwen_towers import QWEN
from penstock.loading.gguf.rules import (
    LeadingOnes,
    Rule,
    Stored,
    UnpermuteRope,
    whole,
)
from penstock.loading.gguf.tower import (
    GATED,
    PLAIN,
    SPLIT,
    GGUFTower,
    ImageProcessing,
    TowerFile,
    in_block,
    normalization,
    square,
)

_SCALE = "vision.projector.scale_factor"


def _vit(tower: TowerFile) -> dict[str, Any]:
    return {
        "hidden_size": tower.width,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.depth,
        "num_attention_heads": tower.num_heads,
        "image_size": tower.image_size,
        "patch_size": tower.patch,
    }


def _vit_rules(tower: TowerFile, prefix: str) -> dict[str, Rule]:
    """CLIP and SigLIP."""
    names = {stem: f"self_attn.{stem[-1]}_proj" for stem in SPLIT}
    names |= {"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"}
    names |= {stem: f"mlp.{name}" for stem, name in PLAIN.items()}
    return {
        "v.patch_embd": Rule(f"{prefix}.embeddings.patch_embedding"),
        "v.position_embd": Rule(f"{prefix}.embeddings.position_embedding"),
        **in_block(tower, f"{prefix}.encoder.layers.{{n}}", names),
    }


def _siglip_rules(tower: TowerFile, prefix: str) -> dict[str, Rule]:
    return {"v.post_ln": Rule(f"{prefix}.post_layernorm"), **_vit_rules(tower, prefix)}


# Gemma 3


def _gemma3_rules(tower: TowerFile) -> dict[str, Rule]:
    projector = "multi_modal_projector"
    return {
        **_siglip_rules(tower, "vision_tower.vision_model"),
        "mm.input_projection.weight": whole(f"{projector}.mm_input_projection_weight"),
        "mm.soft_emb_norm": Rule(f"{projector}.mm_soft_emb_norm", Stored.PLUS_ONE),
    }


def _gemma3_rows(tower: TowerFile) -> int:
    return tower.rows(tower.integer(_SCALE, default=4))


def _gemma3_vision(tower: TowerFile) -> dict[str, Any]:
    eps = tower.number("vision.attention.layer_norm_epsilon")
    return _vit(tower) | {"model_type": "siglip_vision_model", "layer_norm_eps": eps}


def _gemma3_processing(tower: TowerFile) -> ImageProcessing:
    return ImageProcessing(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": square(tower.image_size), **normalization(tower)},
        {"image_seq_length": _gemma3_rows(tower)},
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )


# Idefics 3, SmolVLM


def _idefics3_rules(tower: TowerFile) -> dict[str, Rule]:
    return {
        **_siglip_rules(tower, "model.vision_model"),
        "mm.model.fc": Rule("model.connector.modality_projection.proj"),
    }


def _idefics3_scale(tower: TowerFile) -> int:
    return tower.merge(_SCALE, "mm.model.fc.weight")


def _idefics3_vision(tower: TowerFile) -> dict[str, Any]:
    # The converter's epsilon is another one than transformers' where the checkpoint has none.
    return _vit(tower) | {"model_type": "siglip_vision_model"}


def _idefics3_processing(tower: TowerFile) -> ImageProcessing:
    edge = tower.integer("vision.preproc_image_size", default=4 * tower.image_size)
    return ImageProcessing(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {
            "size": {"longest_edge": edge},
            "max_image_size": {"longest_edge": tower.image_size},
            **normalization(tower),
        },
        {"image_seq_len": tower.rows(_idefics3_scale(tower))},
    )


# Pixtral, Mistral Small 3.1


def _pixtral_rules(tower: TowerFile) -> dict[str, Rule]:
    names = {"attn_v": "attention.v_proj", "attn_out": "attention.o_proj"}
    names |= {"ln1": "attention_norm", "ln2": "ffn_norm"}
    names |= {stem: f"feed_forward.{name}" for stem, name in GATED.items()}
    layer = "vision_tower.transformer.layers.{n}"
    rules = {
        "v.patch_embd": Rule("vision_tower.patch_conv"),
        "v.pre_ln": Rule("vision_tower.ln_pre"),
        "v.blk.{n}.attn_q": Rule(f"{layer}.attention.q_proj", UnpermuteRope("num_attention_heads")),
        "v.blk.{n}.attn_k": Rule(f"{layer}.attention.k_proj", UnpermuteRope("num_attention_heads")),
        **in_block(tower, layer, names),
        "mm.1": Rule("multi_modal_projector.linear_1"),
        "mm.2": Rule("multi_modal_projector.linear_2"),
    }
    if _pixtral_merge(tower) > 1:
        rules |= {
            "mm.input_norm": Rule("multi_modal_projector.norm"),
            "mm.patch_merger": Rule("multi_modal_projector.patch_merger.merging_layer"),
        }
    return rules


def _pixtral_merge(tower: TowerFile) -> int:
    """Squares of patches become one row in Mistral Small 3.1, but not in Pixtral."""
    if not tower.has_tensor("mm.patch_merger.weight"):
        return 1
    return tower.merge("vision.spatial_merge_size", "mm.patch_merger.weight")


def _pixtral_vision(tower: TowerFile) -> dict[str, Any]:
    return _vit(tower) | {"model_type": "pixtral", "hidden_act": tower.activation("gelu")}


def _pixtral_settings(tower: TowerFile) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vision_feature_layer": -1,
        "multimodal_projector_bias": tower.has_tensor("mm.1.bias"),
    }
    if _pixtral_merge(tower) > 1:
        settings |= {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "spatial_merge_size": _pixtral_merge(tower),
        }
    return settings


def _pixtral_processing(tower: TowerFile) -> ImageProcessing:
    return ImageProcessing(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {
            "size": {"longest_edge": tower.image_size},
            "patch_size": tower.patch,
            **normalization(tower),
        },
        {"patch_size": tower.patch, "spatial_merge_size": _pixtral_merge(tower)},
    )


# InternVL


def _internvl_rules(tower: TowerFile) -> dict[str, Rule]:
    layer, tokens = "vision_tower.encoder.layer.{n}", "vision_tower.embeddings"
    names = {stem: f"attention.{stem[-1]}_proj" for stem in SPLIT}
    names |= {"attn_out": "attention.projection_layer"}
    names |= {"ln1": "layernorm_before", "ln2": "layernorm_after"}
    names |= {stem: f"mlp.{name}" for stem, name in PLAIN.items()}
    if tower.has_tensor("v.blk.0.attn_q_norm.weight"):
        names |= {"attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm"}
    projector = "multi_modal_projector"
    return {
        "v.class_embd": whole(f"{tokens}.cls_token", LeadingOnes(3)),
        "v.position_embd.weight": whole(f"{tokens}.position_embeddings", LeadingOnes(3)),
        "v.patch_embd": Rule(f"{tokens}.patch_embeddings.projection"),
        **in_block(tower, layer, names),
        "v.blk.{n}.ls1.weight": whole(f"{layer}.lambda_1"),
        "v.blk.{n}.ls2.weight": whole(f"{layer}.lambda_2"),
        "mm.model.mlp.0": Rule(f"{projector}.layer_norm"),
        "mm.model.mlp.1": Rule(f"{projector}.linear_1"),
        "mm.model.mlp.3": Rule(f"{projector}.linear_2"),
    }


def _internvl_scale(tower: TowerFile) -> int:
    return tower.merge(_SCALE, "mm.model.mlp.1.weight")


def _internvl_vision(tower: TowerFile) -> dict[str, Any]:
    return _vit(tower) | {
        "model_type": "internvl_vision",
        "layer_norm_eps": tower.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": tower.activation("gelu"),
        "attention_bias": tower.has_tensor("v.blk.0.attn_q.bias"),
        "use_qk_norm": tower.has_tensor("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if tower.has_tensor("v.blk.0.ln1.bias") else "rms_norm",
    }


def _internvl_processing(tower: TowerFile) -> ImageProcessing:
    return ImageProcessing(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {
            "size": square(tower.image_size),
            "crop_to_patches": True,
            "min_patches": tower.integer("vision.preproc_min_tiles", default=1),
            "max_patches": tower.integer("vision.preproc_max_tiles", default=12),
            **normalization(tower),
        },
        {"image_seq_length": tower.rows(_internvl_scale(tower))},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


TOWERS: dict[str, GGUFTower] = {
    "gemma3": GGUFTower(
        "Gemma 3",
        {"gemma3": "Gemma3ForConditionalGeneration"},
        _gemma3_rules, _gemma3_vision, _gemma3_processing,
        "mm.input_projection.weight", {"image_token_id": "<image_soft_token>"},
        lambda tower: {"mm_tokens_per_image": _gemma3_rows(tower)},
        output_dim=1,
    ),
    "idefics3": GGUFTower(
        "Idefics 3, SmolVLM, SmolVLM 2",
        {"llama": "Idefics3ForConditionalGeneration"},
        _idefics3_rules, _idefics3_vision, _idefics3_processing,
        "mm.model.fc.weight", {"image_token_id": "<image>"},
        lambda tower: {"scale_factor": _idefics3_scale(tower)},
    ),
    **QWEN,
    "pixtral": GGUFTower(
        "Pixtral, Mistral Small 3.1 and 3.2",
        {
            "llama": "LlavaForConditionalGeneration",
            "mistral3": "LlavaForConditionalGeneration",
        },
        _pixtral_rules, _pixtral_vision, _pixtral_processing,
        "mm.2.weight", {"image_token_id": "[IMG]"}, _pixtral_settings,
        ignored=("v.token_embd.img_break",),
    ),
    "internvl": GGUFTower(
        "InternVL 2.5 to 3.5",
        {
            "qwen2": "InternVLForConditionalGeneration",
            "qwen3": "InternVLForConditionalGeneration",
            "qwen3moe": "InternVLForConditionalGeneration",
        },
        _internvl_rules, _internvl_vision, _internvl_processing,
        "mm.model.mlp.3.weight", {"image_token_id": "<IMG_CONTEXT>"},
        lambda tower: {"downsample_ratio": 1 / _internvl_scale(tower)},
    ),
}  # fmt: skip
