"""Models and options that cannot work are refused at the start, with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_engine import OPTIONS
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.executor.worker import Worker
from penstock.protocol.errors import ConfigError, ModelError

GOOD = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make_unknown(folder: Path) -> Path:
    make_checkpoint(folder, "llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OracleForCausalLM"))
    return folder


def test_models_that_cannot_be_loaded_say_what_is_wrong(tmp_path: Path, tiny_llama: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(str(empty), **OPTIONS)
    with pytest.raises(ModelError, match=r"architectures.*not supported; .*supported: .*Llama"):
        LLM(str(make_unknown(tmp_path / "unknown")), **OPTIONS)
    broken = make_checkpoint(tmp_path / "broken", "llama")
    weights = load_file(broken / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the checkpoint lacks model\.norm\.weight"):
        LLM(str(broken), **OPTIONS)
    save_file(
        weights | {"model.norm.weight": norm, "model.extra.weight": norm.clone()},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.extra\.weight"):
        LLM(str(broken), **OPTIONS)
    save_file(
        weights | {"model.norm.weight": norm[:-1].clone()},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\].*asks for \[64\]"):
        LLM(str(broken), **OPTIONS)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"architectures": 7}, r"config\.json: architectures 7 are not supported"),
        (
            "config.json",
            {"hidden_size": "x"},
            "hidden_size must be an integer of at least 1, got 'x'",
        ),
        ("config.json", {"max_position_embeddings": "x"}, "max_position_embeddings must be an int"),
        ("config.json", {"rms_norm_eps": "x"}, "rms_norm_eps must be a small number, got 'x'"),
        ("config.json", {"rope_scaling": "x"}, "rope_scaling must be an object, got 'x'"),
        ("config.json", {"rope_scaling": {"factor": "x"}}, "factor of rope must be a number"),
        ("config.json", {"rope_parameters": {"rope_type": "llama3"}}, "needs low_freq_factor"),
        (
            "config.json",
            {"rope_scaling": {"type": "linear", "factor": 1e30}},
            "to 1e.06, got 1e.30",
        ),
        (
            "config.json",
            {"rope_scaling": {"type": "yarn", "factor": 10**400}},
            "factor of rope must",
        ),
        ("config.json", {"partial_rotary_factor": 1e30}, "partial_rotary_factor of rope must be"),
        ("config.json", {"max_position_embeddings": 10**30}, "max_position_embeddings must be be"),
        (
            "config.json",
            {
                "max_position_embeddings": 2**30,
                "rope_parameters": {"rope_type": "linear", "factor": 1e5},
            },
            "context must be at most 2147483647 tokens",
        ),
        ("config.json", {"eos_token_id": ["x"]}, "eos_token_id must be a token id or a list"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id must be a token id or a l"),
        ("generation_config.json", {"top_p": 7}, r"generation_config\.json is wrong: top_p must"),
    ],
)
def test_nonsense_in_a_models_files_is_named(
    tiny_llama: str, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), load_format="dummy", **OPTIONS)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("Mistral", {"sliding_window": "x"}, "sliding_window must be an integer of at least 1"),
        ("Qwen2", {"sliding_window": 8, "layer_types": ["x"]}, "layer_types must name sliding_att"),
        ("Qwen2", {"sliding_window": 8, "max_window_layers": "x"}, "max_window_layers must be an"),
    ],
)
def test_nonsense_about_windows_is_named(
    tiny_llama: str, tmp_path: Path, architecture: str, values: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    path = folder / "config.json"
    described = {"architectures": [f"{architecture}ForCausalLM"], "use_sliding_window": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | described | values))
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), load_format="dummy", **OPTIONS)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 33.3 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_cache_that_finds_no_memory_says_what_to_lower(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(Worker, "start", fail)
    with pytest.raises(ConfigError, match=r"no memory for a KV cache of .* lower kv_cache_memory"):
        LLM(tiny_llama, **OPTIONS)


def test_impossible_engine_options_are_refused(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM(tiny_llama, max_model_lenght=5)
    with pytest.raises(
        ConfigError, match="max_model_len must be at most the model's maximum of 512"
    ):
        LLM(tiny_llama, max_model_len=1024, **OPTIONS)
    with pytest.raises(ConfigError, match="set max_model_len to at most 48"):
        LLM(tiny_llama, max_model_len=512, num_gpu_blocks_override=4, **OPTIONS)
    with pytest.raises(ConfigError, match="served_model_name must be a list of str, got"):
        LLM(tiny_llama, served_model_name=[5], **OPTIONS)
    with pytest.raises(ConfigError, match="seed must be from"):
        LLM(tiny_llama, seed=2**70, **OPTIONS)
    with pytest.raises(ConfigError, match='must be "module:Class", got "no_class"'):
        LLM(tiny_llama, logits_processors="no_class", **OPTIONS)
    with pytest.raises(ConfigError, match="must be at least max_model_len"):
        LLM(
            tiny_llama,
            enable_chunked_prefill=False,
            max_num_batched_tokens=32,
            **OPTIONS,
        )


def test_a_context_nobody_asked_for_shrinks_to_what_the_cache_holds(tiny_llama: str) -> None:
    with LLM(tiny_llama, num_gpu_blocks_override=4, **OPTIONS) as llm:
        assert llm.engine.limits.max_model_len == 48
        assert len(llm.generate(GOOD, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
