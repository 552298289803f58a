"""vLLM's modules that are not here, with what to do about each.

An import of one, such as ``penstock.assets.image``, raises an ImportError that says it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_KERNELS = "the kernels are chosen by device and model"
_ENTRYPOINTS = "use penstock serve, or LLM and AsyncLLM"
_MODELS = "a plugin adds models (docs/adding-a-model.md)"
_PARSERS = "name a parser of docs/parsers.md in {}"
_TOKENIZERS = "use get_tokenizer() of LLM, or transformers' AutoTokenizer"
_PROCESSOR = "subclass penstock.runner.logits_processors.LogitsProcessor"
_INTERNAL = "use LLM, AsyncLLM or LLMEngine: the engine's own modules have other names"

# By name without ``vllm.``; what is below a module has its text.
MODULES = {
    "assets": "open images with Pillow, or give image_url in messages",
    "attention": _KERNELS,
    "benchmarks": "use penstock bench",
    "collect_env": "use penstock collect-env",
    "compilation": "nothing is compiled with torch.compile",
    "connections": "use urllib or httpx",
    "engine.metrics": "use LLM.get_metrics, or /metrics",
    "engine.protocol": "use AsyncLLM",
    "entrypoints.api_server": _ENTRYPOINTS,
    "entrypoints.chat_utils": "use LLM.chat, or get_tokenizer().apply_chat_template",
    "entrypoints.launcher": _ENTRYPOINTS,
    "entrypoints.launchers": _ENTRYPOINTS,
    "entrypoints.openai.cli_args": _ENTRYPOINTS,
    "entrypoints.openai.protocol": "use the types of the openai package",
    "entrypoints.openai.reasoning_parsers": _PARSERS.format("reasoning_parser"),
    "entrypoints.openai.run_batch": "use penstock run-batch",
    "entrypoints.openai.tool_parsers": _PARSERS.format("tool_call_parser"),
    "entrypoints.score_utils": "use LLM.score",
    "entrypoints.serve": _ENTRYPOINTS,
    "entrypoints.utils": _ENTRYPOINTS,
    "envs": "environment variables have no effect on behaviour: use options",
    "exceptions": "use penstock.protocol.errors",
    "forward_context": _MODELS,
    "lora.peft_helper": "use LoRARequest with the adapter's folder",
    "lora.utils": "use LoRARequest with the adapter's folder",
    "model_executor": _MODELS,
    "multimodal.inputs": "use a dict of images and videos",
    "multimodal.processing": _MODELS,
    "multimodal.registry": _MODELS,
    "multimodal.video": "give frames as a numpy array, or video_url in messages",
    "platforms.interface": "use torch.cuda",
    "plugins": _MODELS,
    "profiler": "use profiler_config with start_profile and stop_profile",
    "reasoning": _PARSERS.format("reasoning_parser"),
    "renderers": "use LLM.chat, or get_tokenizer().apply_chat_template",
    "sequence": "outputs are in penstock.outputs, logprobs in penstock.logprobs",
    "tokenizers": _TOKENIZERS,
    "tool_parsers": _PARSERS.format("tool_call_parser"),
    "tracing": "use otlp_traces_endpoint",
    "transformers_utils": _TOKENIZERS,
    "triton_utils": "import triton",
    "usage": "no usage is reported: leave it out",
    "utils.system_utils": "use the modules resource and multiprocessing",
    "utils.torch_utils": "use torch",
    "v1.attention": _KERNELS,
    "v1.core": _INTERNAL,
    "v1.engine.core": _INTERNAL,
    "v1.engine.core_client": _INTERNAL,
    "v1.executor": "use distributed_executor_backend",
    "v1.kv_offload": "raise kv_cache_memory_bytes",
    "v1.metrics.loggers": "use LLM.get_metrics, or /metrics",
    "v1.metrics.stats": "use RequestOutput.metrics",
    "v1.outputs": "use penstock.outputs",
    "v1.request": _INTERNAL,
    "v1.sample.logits_processor.builtin": _PROCESSOR,
    "v1.sample.metadata": _PROCESSOR,
    "v1.sample.sampler": _PROCESSOR,
    "v1.spec_decode": "use speculative_config",
    "v1.worker": _MODELS,
    "worker": _MODELS,
}


class ForeignModules:
    """The last finder of `sys.meta_path`: asked for modules that nobody has."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package == "penstock" and name in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is not in Penstock: {MODULES[name]}", name=fullname
            )
        return None


def answer_imports() -> None:
    """Have imports of vLLM's modules answered."""
    if ForeignModules not in sys.meta_path:
        sys.meta_path.append(ForeignModules)
