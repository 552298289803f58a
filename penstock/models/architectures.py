"""The table of supported architectures: their names in config.json, and the class of each.

docs/models.md is generated from this table. `parity` names the small random checkpoints of
tests/tiny_models.py on which greedy tokens are compared with transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    target: str  # module:class
    models: str  # models with this architecture
    parity: tuple[str, ...]
    remark: str = ""  # for users


def _own(
    name: str, module: str, models: str, parity: tuple[str, ...], remark: str = ""
) -> dict[str, Architecture]:
    return {name: Architecture(f"penstock.models.{module}:{name}", models, parity, remark)}


ARCHITECTURES: dict[str, Architecture] = {
    **_own(
        "CohereForCausalLM", "cohere", "Command R, Command R+, Aya 23", ("cohere", "cohere_qk_norm")
    ),
    **_own(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        "DeepSeek V2, V2.5 and V2-Lite, DeepSeek-Coder-V2",
        ("deepseek_v2", "deepseek_v2_lite"),
    ),
    **_own(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        "DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight",
        ("deepseek_v3", "deepseek_v3_halves"),
        "Multi-token-prediction (MTP) layers are loaded for speculative decoding.",
    ),
    **_own("Exaone4ForCausalLM", "exaone4", "EXAONE 4", ("exaone4", "exaone4_windowed")),
    **_own(
        "FalconH1ForCausalLM",
        "falcon_h1",
        "Falcon-H1",
        ("falcon_h1", "falcon_h1_normed"),
    ),
    **_own("GemmaForCausalLM", "gemma", "Gemma 1", ("gemma",)),
    **_own("Gemma2ForCausalLM", "gemma2", "Gemma 2", ("gemma2",)),
    **_own("Gemma3ForCausalLM", "gemma3", "Gemma 3 1B", ("gemma3",)),
    **_own("Glm4ForCausalLM", "glm4", "GLM-4-0414 9B and 32B", ("glm4",)),
    **_own(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
        ("glm4_moe", "glm4_moe_unnormed"),
        "Multi-token-prediction (MTP) layers are loaded for speculative decoding.",
    ),
    **_own(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        ("glm4_moe_lite",),
        "Multi-token-prediction (MTP) layers are loaded for speculative decoding.",
    ),
    **_own(
        "GptOssForCausalLM",
        "gpt_oss",
        "gpt-oss-20b and 120b",
        ("gpt_oss",),
        "Experts stay in MXFP4, as published. If tensor parallelism would split a quantization "
        "group of 32, they are converted to 16 bits while they load.",
    ),
    **_own("GraniteForCausalLM", "granite", "Granite 3 (dense)", ("granite",)),
    **_own(
        "LlamaForCausalLM",
        "llama",
        "Llama 1 to 3, SmolLM2, TinyLlama, Yi",
        (
            "llama",
            "llama_tied_biased",
            "llama_rope_linear",
            "llama_rope_dynamic",
            "llama_rope_llama3",
            "llama_rope_yarn",
        ),
    ),
    **_own(
        "Llama4ForCausalLM",
        "llama4",
        "Llama 4 (text)",
        ("llama4_unnormed", "llama4"),
    ),
    **_own(
        "Mamba2ForCausalLM",
        "mamba2",
        "Mamba-2, Mamba Codestral 7B",
        ("mamba2", "mamba2_biased"),
        "The model has no maximum context: it is 2048 unless `max_model_len` is set. The residual "
        "stream has the model's dtype, even with `residual_in_fp32`.",
    ),
    **_own(
        "MiMoForCausalLM",
        "mimo",
        "MiMo 7B",
        ("mimo",),
        "Multi-token-prediction (MTP) layers are loaded for speculative decoding.",
    ),
    **_own("MiniMaxM2ForCausalLM", "minimax_m2", "MiniMax-M2, M2.1", ("minimax_m2",)),
    **_own("MistralForCausalLM", "mistral", "Mistral 7B", ("mistral", "mistral_windowed")),
    **_own("MixtralForCausalLM", "mixtral", "Mixtral 8x7B and 8x22B", ("mixtral",)),
    **_own("Olmo2ForCausalLM", "olmo2", "OLMo 2", ("olmo2",)),
    **_own(
        "Phi3ForCausalLM",
        "phi3",
        "Phi-3, Phi-3.5 (without experts), Phi-4, Phi-4-mini",
        ("phi3", "phi3_longrope"),
        "Long-context versions have two sets of rotary factors. The long set is used for all "
        "sequences, unless `max_model_len` is at most `original_max_position_embeddings`.",
    ),
    **_own("Qwen2ForCausalLM", "qwen2", "Qwen 2 and 2.5", ("qwen2", "qwen2_windowed")),
    **_own("Qwen2MoeForCausalLM", "qwen2_moe", "Qwen 1.5 and 2 with experts", ("qwen2_moe",)),
    **_own("Qwen3ForCausalLM", "qwen3", "Qwen 3 (dense)", ("qwen3", "qwen3_tied")),
    **_own("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen 3 with experts", ("qwen3_moe",)),
    **_own(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        ("qwen3_next",),
        "Multi-token-prediction (MTP) layers are loaded for speculative decoding.",
    ),
    **_own("SmolLM3ForCausalLM", "smollm3", "SmolLM3", ("smollm3", "smollm3_windowed")),
    **_own(
        "Starcoder2ForCausalLM", "starcoder2", "StarCoder2", ("starcoder2", "starcoder2_unbiased")
    ),
}


def _encoder(
    family: str, target: str, models: str, parity: tuple[str, ...], heads: tuple[str, ...] = ()
) -> dict[str, Architecture]:
    """An encoder with each of the heads that its checkpoints have."""
    known = Architecture(f"penstock.models.{target}", models, parity)
    every = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return {f"{family}{head}": known for head in (*every, *heads)}


# Pooling models. `parity` names checkpoints of tests/tiny_encoders.py.
ENCODERS: dict[str, Architecture] = {
    **_encoder(
        "Bert",
        "bert:BertModel",
        "BERT; MiniLM, bge 1.5, e5, gte, mxbai-embed",
        ("bert",),
        heads=("ForPreTraining",),
    ),
    **_encoder(
        "Roberta", "bert:RobertaModel", "RoBERTa; all-roberta, all-distilroberta", ("roberta",)
    ),
    **_encoder(
        "XLMRoberta",
        "bert:RobertaModel",
        "XLM-RoBERTa; bge-m3, bge-reranker-v2-m3, multilingual-e5, jina-reranker-v2, "
        "jina-embeddings-v3",
        ("xlm_roberta", "jina_v3"),
    ),
    **_encoder(
        "JinaEmbeddingsV3",
        "bert:JinaEmbeddingsV3Model",
        "jina-embeddings-v3-hf, as transformers saves it",
        ("jina_v3",),
    ),
    **_encoder(
        "DistilBert", "bert:DistilBertModel", "DistilBERT; multi-qa-distilbert", ("distilbert",)
    ),
    **_encoder(
        "ModernBert",
        "modernbert:ModernBertModel",
        "ModernBERT; gte-modernbert, modernbert-embed",
        ("modernbert",),
    ),
    **_encoder(
        "NomicBert", "nomic_bert:NomicBertModel", "nomic-embed-text v1 and v1.5", ("nomic_bert",)
    ),
    **_encoder(
        "New",
        "nomic_bert:GteModel",
        "gte-en v1.5, gte-multilingual, snowflake-arctic-embed v2",
        ("gte",),
    ),
    **_encoder("Gte", "nomic_bert:GteModel", "the same, as transformers saves them", ("gte",)),
    "Gemma3TextModel": Architecture(
        "penstock.models.gemma3:Gemma3ForCausalLM", "EmbeddingGemma", ("embedding_gemma",)
    ),
}

# Models that take images. `parity` names checkpoints of tests/tiny_vision.py.
VISION: dict[str, Architecture] = {
    **_own("Gemma3ForConditionalGeneration", "gemma3", "Gemma 3 4B, 12B and 27B", ("gemma3",)),
    **_own(
        "LlavaForConditionalGeneration", "llava", "LLaVA 1.5, Pixtral 12B", ("llava", "pixtral")
    ),
    **_own(
        "Mistral3ForConditionalGeneration", "mistral3", "Mistral Small 3.1 and 3.2", ("mistral3",)
    ),
    **_own(
        "LlavaNextForConditionalGeneration", "llava_next", "LLaVA 1.6 (LLaVA-NeXT)", ("llava_next",)
    ),
    **_own(
        "LlavaOnevisionForConditionalGeneration",
        "llava_next",
        "LLaVA-OneVision",
        ("llava_onevision",),
    ),
    **_own(
        "InternVLForConditionalGeneration",
        "internvl",
        "InternVL 3 and 3.5, as transformers saves them (-hf)",
        ("internvl", "internvl_normed"),
    ),
    **_own(
        "Llama4ForConditionalGeneration",
        "llama4_vision",
        "Llama 4 Scout and Maverick",
        ("llama4",),
    ),
    **_own(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        "PaliGemma and PaliGemma 2",
        ("paligemma", "paligemma2"),
    ),
    **_own("Glm4vForConditionalGeneration", "glm4v", "GLM-4.1V", ("glm4v",)),
    **_own("Glm4vMoeForConditionalGeneration", "glm4v", "GLM-4.5V", ("glm4v_moe",)),
    **_own("Idefics3ForConditionalGeneration", "idefics3", "Idefics 3", ("idefics3",)),
    **_own("SmolVLMForConditionalGeneration", "idefics3", "SmolVLM, SmolVLM 2", ("smolvlm",)),
    **_own("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3-VL (dense)", ("qwen3_vl",)),
    **_own(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl",
        "Qwen3-VL 30B-A3B and 235B-A22B",
        ("qwen3_vl_moe",),
    ),
    **_own("Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2-VL, QVQ", ("qwen2_vl",)),
    **_own("Qwen2_5_VLForConditionalGeneration", "qwen2_vl", "Qwen2.5-VL", ("qwen2_5_vl",)),
}

# Dual encoders. `parity` names checkpoints of tests/tiny_dual_encoders.py.
DUAL_ENCODERS: dict[str, Architecture] = {
    **_own("CLIPModel", "dual_encoder", "CLIP", ("clip", "clip_old")),
    **_own(
        "SiglipModel",
        "dual_encoder",
        "SigLIP, SigLIP 2 of one resolution",
        ("siglip", "siglip2"),
    ),
}

# Architectures that run on transformers' code, with the checkpoints on which tokens were compared.
RUN_BY_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "StableLmForCausalLM": ("stablelm",),
    "Cohere2ForCausalLM": ("cohere2",),
    "OlmoeForCausalLM": ("olmoe",),
    "GPTNeoXForCausalLM": ("gpt_neox",),
    "Olmo3ForCausalLM": ("olmo3",),
    "SeedOssForCausalLM": ("seed_oss",),
}

# Model types (`model_type`) whose logits were compared, in chunks and in batches.
LOGITS_BY_TRANSFORMERS = (
    "afmoe", "apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "cohere2",
    "cohere2_moe", "cwm", "ernie4_5", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma",
    "glm", "gpt2", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "jais2", "kolibri1", "laguna", "mellum", "ministral", "ministral3", "modernbert-decoder",
    "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi", "phimoe",
    "seed_oss", "solar_open", "stablelm", "vaultgemma",
)  # fmt: skip
