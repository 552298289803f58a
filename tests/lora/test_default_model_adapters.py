"""Adapters of the real default model, whose weights stay in GGUF quantization blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_plans import Driver
from safetensors.torch import save_file

OPTIONS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
HIDDEN, MIDDLE, KEYS = 576, 1536, 192
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}
PROMPTS = [{"prompt_token_ids": list(range(100, 100 + length))} for length in (5, 33)]


def write_adapter(folder: Path, rank: int, seed: int, *, dora: bool = False) -> Path:
    """A random adapter of the model's first layers, in PEFT's format."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, (out_features, in_features) in SHAPES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            shapes = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
            for kind, shape in shapes.items():
                tensors[f"{module}.{kind}.weight"] = 0.05 * torch.randn(shape, generator=generator)
            if dora:
                magnitude = 1 + torch.rand(out_features, generator=generator)
                tensors[f"{module}.lora_magnitude_vector"] = magnitude
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "use_dora": dora,
        "target_modules": [name.rpartition(".")[2] for name in SHAPES],
        "layers_to_transform": [0, 1, 2],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / "plain", 16, 1),
        write_adapter(root / "dora", 8, 2, dora=True),
        write_adapter(root / "large", 64, 3),
    ]


def test_base_and_three_adapters_together_give_the_bits_of_each_alone(
    default_model: str, folders: list[Path]
) -> None:
    driver = Driver(default_model, cpu_threads=2, **OPTIONS)
    for slot, folder in enumerate(folders):
        driver.load(folder, slot)
    cases = [(prompt, slot) for prompt in PROMPTS for slot in (-1, 0, 1, 2)]
    alone = [driver.generate([driver.request(*case)], 6)[0].bits for case in cases]
    requests = [driver.request(*case) for case in cases]
    assert [one.bits for one in driver.generate(requests, 6, chunk=9)] == alone
    assert len({tuple(rows[0]) for _, rows in alone}) == len(cases)
    driver.close()


def test_the_library_and_torch_give_nearly_the_same(
    default_model: str, folders: list[Path]
) -> None:
    logprobs = []
    for options in ({"gguf_compute": "dequantize"}, {"cpu_backend": "torch"}):
        driver = Driver(default_model, **OPTIONS, **options)
        for slot, folder in enumerate(folders):
            driver.load(folder, slot)
        requests = [driver.request(PROMPTS[1], slot) for slot in range(3)]
        logprobs.append([one.logprobs[0] for one in driver.generate(requests, 1)])
        driver.close()
    library, plain = (torch.tensor(rows) for rows in logprobs)
    torch.testing.assert_close(library, plain, rtol=0, atol=5e-3)
