"""The vision-language checkpoints of tiny_vision.py: one for each architecture."""

from __future__ import annotations

from typing import Any, NamedTuple


class Variant(NamedTuple):
    model: str  # class in transformers
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]  # preprocessor_config.json
    image: str = "<|vision_start|><|image_pad|><|vision_end|>"  # what the template writes
    video: str = ""
    image_token: str = "<|image_pad|>"
    special: tuple[str, ...] = ()  # further tokens
    outer: dict[str, Any] = {}  # further settings of config.json
    own: dict[str, Any] = {}  # settings of processor_config.json
    named: dict[str, str] = {}  # special tokens that the processor knows by a name
    needs_image: bool = False  # the processor takes no text alone
    max_span: int = 0  # tokens that a step cannot divide
    num_groups: int = 1  # of layers that keep different tokens


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_PROCESSOR = {
    "min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28, "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28],
}  # fmt: skip
QWEN3_VISION = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "patch_size": 14, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
QWEN3_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor",
    **QWEN_PROCESSOR,
}  # fmt: skip

VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
TILES = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IDEFICS_PROCESSOR = {
    "size": {"longest_edge": 224},
    "max_image_size": {"longest_edge": 56},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
IDEFICS_VISION = {**VIT, "image_size": 56, "patch_size": 14}
CLIP_VISION = {
    **VIT, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14,
    "projection_dim": 16,
}  # fmt: skip
GRIDS = [
    [56 * rows, 56 * columns]
    for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (1, 4), (4, 1), (2, 3))
]
INTERN_VISION = {
    **VIT, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14],
}  # fmt: skip
INTERN_PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "processor_class": "InternVLProcessor",
    "size": {"height": 56, "width": 56},
    "crop_to_patches": True,
    "max_patches": 6,
}
INTERN_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GLM_ROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}  # fmt: skip
GLM_TOKENS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip
GLM_VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
GLM_PROCESSOR = {
    "image_processor_type": "Glm4vImageProcessor",
    "processor_class": "Glm4vProcessor",
    "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
PALIGEMMA_PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "PaliGemmaProcessor",
    "size": {"height": 56, "width": 56},
    "image_seq_length": 16,
}
PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": "PixtralProcessor",
    "size": {"longest_edge": 112},
    "patch_size": 14,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}

VARIANTS: dict[str, Variant] = {
    "gemma3": Variant(
        "Gemma3ForConditionalGeneration",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {**VIT, "image_size": 112, "patch_size": 14},
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 112, "width": 112},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        image="<start_of_image>",
        special=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        outer={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "mm_tokens_per_image": 16,
        },
        own={"image_seq_length": 16},
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        max_span=16,
        num_groups=2,
    ),
    "llava": Variant(
        "LlavaForConditionalGeneration",
        {"model_type": "llama"},
        CLIP_VISION,
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
        },
        image="<image>",
        special=("<image>",),
        outer={"image_token_index": "<image>"},
        own={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "pixtral": Variant(
        "LlavaForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {**VIT, "model_type": "pixtral", "image_size": 112, "patch_size": 14},
        PIXTRAL_PROCESSOR,
        image="[IMG]",
        special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        outer={
            "image_token_index": "[IMG]",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        own={"patch_size": 14},
    ),
    "mistral3": Variant(
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {
            **VIT,
            "model_type": "pixtral",
            "image_size": 112,
            "patch_size": 14,
            "hidden_act": "silu",
        },
        PIXTRAL_PROCESSOR,
        image="[IMG]",
        special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        outer={"image_token_index": "[IMG]", "tie_word_embeddings": False},
        own={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava_next": Variant(
        "LlavaNextForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        CLIP_VISION,
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": GRIDS[:5],
        },
        image="<image>",
        special=("<image>",),
        outer={"image_token_index": "<image>", "image_grid_pinpoints": GRIDS[:5]},
        own={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": Variant(
        "LlavaOnevisionForConditionalGeneration",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {**VIT, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": GRIDS,
        },
        image="<image>",
        video="<video>",
        special=("<image>", "<video>"),
        outer={
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": GRIDS,
            "vision_aspect_ratio": "anyres_max_2",
        },
        own={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "internvl": Variant(
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        INTERN_VISION,
        INTERN_PROCESSOR,
        image="<IMG_CONTEXT>",
        video="<video>",
        special=tuple(INTERN_TOKENS.values()),
        outer={"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4},
        own={"image_seq_length": 4},
        named=INTERN_TOKENS,
    ),
    "internvl_normed": Variant(
        "InternVLForConditionalGeneration",
        {"model_type": "qwen3", "head_dim": 16},
        {**INTERN_VISION, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
        INTERN_PROCESSOR,
        image="<IMG_CONTEXT>",
        video="<video>",
        special=tuple(INTERN_TOKENS.values()),
        outer={
            "image_token_id": "<IMG_CONTEXT>",
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        own={"image_seq_length": 4},
        named=INTERN_TOKENS,
    ),
    "paligemma": Variant(
        "PaliGemmaForConditionalGeneration",
        {"model_type": "gemma", "head_dim": 16},
        {**VIT, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        PALIGEMMA_PROCESSOR,
        image="<image>",
        special=("<image>",),
        outer={"image_token_index": "<image>", "projection_dim": 64},
        named={"image_token": "<image>"},
        needs_image=True,
        max_span=1024,
    ),
    "paligemma2": Variant(
        "PaliGemmaForConditionalGeneration",
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9},
        {**VIT, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        PALIGEMMA_PROCESSOR,
        image="<image>",
        special=("<image>",),
        outer={"image_token_index": "<image>", "projection_dim": 64},
        named={"image_token": "<image>"},
        needs_image=True,
        max_span=1024,
        num_groups=2,
    ),
    "llama4": Variant(
        "Llama4ForConditionalGeneration",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 0],
        },
        {
            **VIT,
            "intermediate_size": 128,  # also the width of four patches
            "image_size": 56,
            "patch_size": 14,
            "vision_output_dim": 40,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
        },
        {
            "image_processor_type": "Llama4ImageProcessor",
            "processor_class": "Llama4Processor",
            "size": {"height": 56, "width": 56},
            "max_patches": 6,
        },
        image="<|image|>",
        special=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        outer={
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
            "image_token_index": "<|patch|>",
        },
        own={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        num_groups=2,
    ),
    "glm4v": Variant(
        "Glm4vForConditionalGeneration",
        {"rope_parameters": GLM_ROPE, "head_dim": 16},
        GLM_VISION,
        GLM_PROCESSOR,
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
        special=tuple(GLM_TOKENS.values()),
        outer=GLM_TOKENS,
    ),
    "glm4v_moe": Variant(
        "Glm4vMoeForConditionalGeneration",
        {
            "rope_parameters": GLM_ROPE,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        {**GLM_VISION, "attention_bias": True},
        GLM_PROCESSOR,
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
        special=tuple(GLM_TOKENS.values()),
        outer=GLM_TOKENS,
    ),
    "idefics3": Variant(
        "Idefics3ForConditionalGeneration",
        {"model_type": "llama"},
        IDEFICS_VISION,
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            **IDEFICS_PROCESSOR,
        },
        image="<image>",
        special=TILES,
        outer={"image_token_id": "<image>", "scale_factor": 2, "pad_token_id": 2},
        own={"image_seq_len": 4},
    ),
    "smolvlm": Variant(
        "SmolVLMForConditionalGeneration",
        {"model_type": "llama"},
        IDEFICS_VISION,
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            **IDEFICS_PROCESSOR,
        },
        image="<image>",
        video="<video>",
        special=TILES,
        outer={"image_token_id": "<image>", "scale_factor": 2, "pad_token_id": 2},
        own={"image_seq_len": 4},
    ),
    "qwen3_vl": Variant(
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_VISION,
        QWEN3_PROCESSOR,
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen3_vl_moe": Variant(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "head_dim": 16,
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        QWEN3_VISION,
        QWEN3_PROCESSOR,
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen2_vl": Variant(
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": MROPE},
        {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            **QWEN_PROCESSOR,
        },
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": Variant(
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": MROPE},
        {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            **QWEN_PROCESSOR,
        },
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
}
