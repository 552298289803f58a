"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import Any

from penstock.loading.gguf.metadata import fail, find_tensor
from penstock.loading.gguf.rules import Piece, Rule, whole
from penstock.loading.gguf.tower import (
    GATED,
    PLAIN,
    SPLIT,
    GGUFTower,
    ImageProcessing,
    TowerFile,
    in_block,
    normalization,
)

_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}


def _qwen_rules(tower: TowerFile, mlp: dict[str, str]) -> dict[str, Rule]:
    names = {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
    names |= {stem: f"mlp.{name}" for stem, name in mlp.items()}
    rules = in_block(tower, "visual.blocks.{n}", names)
    if tower.has_tensor("v.blk.0.attn_qkv.weight"):
        rules["v.blk.{n}.attn_qkv"] = Rule("visual.blocks.{n}.attn.qkv")
    else:
        for number, stem in enumerate(SPLIT):
            rules[f"v.blk.{{n}}.{stem}"] = Rule("visual.blocks.{n}.attn.qkv", Piece(number, 3))
    patches = "visual.patch_embed.proj"
    for number, ending in enumerate(("", ".1")):
        rules[f"v.patch_embd.weight{ending}"] = whole(
            f"{patches}.weight", Piece(number, 2, "frames")
        )
    return rules


def _qwen2_rules(tower: TowerFile, mlp: dict[str, str]) -> dict[str, Rule]:
    return {
        **_qwen_rules(tower, mlp),
        "v.post_ln": Rule("visual.merger.ln_q"),
        "mm.0": Rule("visual.merger.mlp.0"),
        "mm.2": Rule("visual.merger.mlp.2"),
    }


def _qwen3_rules(tower: TowerFile) -> dict[str, Rule]:
    rules = {
        **_qwen_rules(tower, {"ffn_up": "linear_fc1", "ffn_down": "linear_fc2"}),
        "v.patch_embd.bias": whole("visual.patch_embed.proj.bias"),
        "v.position_embd": Rule("visual.pos_embed"),
        "v.post_ln": Rule("visual.merger.norm"),
        "mm.0": Rule("visual.merger.linear_fc1"),
        "mm.2": Rule("visual.merger.linear_fc2"),
    }
    names = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
    for number, layer in enumerate(_deepstack_layers(tower)):
        for stem, name in names.items():
            path = f"visual.deepstack_merger_list.{number}.{name}"
            rules[f"v.deepstack.{layer}.{stem}"] = Rule(path)
    return rules


def _deepstack_layers(tower: TowerFile) -> list[int]:
    flags = tower.get("vision.is_deepstack_layers")
    if not isinstance(flags, list) or len(flags) != tower.depth:
        fail(
            tower.file,
            f"clip.vision.is_deepstack_layers must have one entry for each of {tower.depth} "
            f"layers, got {flags!r:.80}",
        )
    return [layer for layer, flag in enumerate(flags) if flag]


def _qwen(tower: TowerFile) -> dict[str, Any]:
    return {
        "depth": tower.depth,
        "num_heads": tower.num_heads,
        "intermediate_size": tower.intermediate_size,
        "patch_size": tower.patch,
        "spatial_merge_size": _merge(tower),
    }


def _merge(tower: TowerFile) -> int:
    return tower.merge("vision.spatial_merge_size", "mm.0.weight")


def _qwen2_vision(tower: TowerFile) -> dict[str, Any]:
    return _qwen(tower) | {
        "embed_dim": tower.width,
        "mlp_ratio": tower.intermediate_size / tower.width,
        "hidden_act": tower.activation("gelu_pytorch_tanh"),
    }


def _qwen25_vision(tower: TowerFile) -> dict[str, Any]:
    period = tower.integer("vision.n_wa_pattern")
    return _qwen(tower) | {
        "hidden_size": tower.width,
        "window_size": tower.integer("vision.window_size", default=112),
        "fullatt_block_indexes": list(range(period - 1, tower.depth, period)),
        "tokens_per_second": 2,
    }


def _qwen3_vision(tower: TowerFile) -> dict[str, Any]:
    return _qwen(tower) | {
        "hidden_size": tower.width,
        "num_position_embeddings": find_tensor(
            tower.file, "v.position_embd.weight", num_dims=2
        ).shape[0],
        "deepstack_visual_indexes": _deepstack_layers(tower),
    }


def _qwen_processing(
    tower: TowerFile, processor: str, bounds: tuple[int, int], of_videos: tuple[int, int] | None
) -> ImageProcessing:
    """Bounds of sizes are in rows of the tower's output; those of videos may be the same."""
    pixels = (tower.patch * _merge(tower)) ** 2
    low, high = bounds
    size = {
        "shortest_edge": tower.integer("vision.image_min_pixels", default=low * pixels),
        "longest_edge": tower.integer("vision.image_max_pixels", default=high * pixels),
    }
    common = {
        "patch_size": tower.patch,
        "merge_size": _merge(tower),
        "temporal_patch_size": 2,
        **normalization(tower),
    }
    videos: dict[str, Any] = {}
    if of_videos is not None:
        low, high = of_videos
        frames = {"shortest_edge": low * pixels, "longest_edge": high * pixels}
        videos = {"size": frames, **common}
    return ImageProcessing(
        processor, "Qwen2VLImageProcessor", {"size": size, **common}, videos=videos
    )


QWEN: dict[str, GGUFTower] = {
    "qwen2vl_merger": GGUFTower(
        "Qwen2-VL",
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        lambda tower: _qwen2_rules(tower, PLAIN),
        _qwen2_vision,
        lambda tower: _qwen_processing(tower, "Qwen2VLProcessor", (4, 16384), None),
        "mm.2.weight", _IDS, mrope={},
        ignored=("v.position_embd.weight",),  # zeros, in the first files
    ),
    "qwen2.5vl_merger": GGUFTower(
        "Qwen2.5-VL",
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        lambda tower: _qwen2_rules(tower, GATED),
        _qwen25_vision,
        lambda tower: _qwen_processing(tower, "Qwen2_5_VLProcessor", (4, 16384), None),
        "mm.2.weight", _IDS, mrope={},
    ),
    "qwen3vl_merger": GGUFTower(
        "Qwen3-VL",
        {
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
        },
        _qwen3_rules, _qwen3_vision,
        lambda tower: _qwen_processing(tower, "Qwen3VLProcessor", (64, 16384), (4, 24576)),
        "mm.2.weight", _IDS, mrope={"mrope_interleaved": True},
    ),
}  # fmt: skip
