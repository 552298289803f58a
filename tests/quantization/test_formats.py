"""Every format of quantized checkpoints gives the logits of the floats that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import torch
import transformers
from tiny_models import Reference

from penstock import LLM, SamplingParams

VOCAB = 256
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "cpu_threads": 1,
    "enable_prefix_caching": False,
    "log_level": "error",
    "max_logprobs": -1,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 2**24,
    "dtype": "float32",
}
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 33, 64)
]
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=VOCAB)
EXACT = 1e-4  # weights alone are quantized, and products are in float32
ROUNDED = 0.02  # activations are rounded too: a sum's last bit may decide which way
NATIVE = 0.06  # the library computes with integers, and rounds activations by blocks of 32

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}


def fp8_by_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_by_128(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([fp8_by_token(part) for part in x.split(128, dim=-1)], dim=-1)


def fp8_static(x: torch.Tensor) -> torch.Tensor:
    return (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02


def int8_by_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def int8_static(x: torch.Tensor) -> torch.Tensor:
    return (x / 0.05).round().clamp(-128, 127) * 0.05


Rounding = Callable[[torch.Tensor], torch.Tensor]

# What writes the format, and what it does to activations.
FORMATS: dict[str, tuple[Callable[[], Any], Rounding | None]] = {
    "gptq": (lambda: made.gptq(), None),
    "gptq asymmetric": (lambda: made.gptq(symmetric=False, group_size=64), None),
    "gptq by row": (lambda: made.gptq(group_size=-1), None),
    "gptq 8 bits": (lambda: made.gptq(bits=8), None),
    "gptq act-order": (lambda: made.gptq(symmetric=False, act_order=True), None),
    "gptq v2": (lambda: made.gptq(symmetric=False, version=2), None),
    "awq": (lambda: made.awq(), None),
    "awq by 128": (lambda: made.awq(group_size=128), None),
    "fp8 by block": (lambda: made.fp8("block"), fp8_by_128),
    "fp8 by channel": (lambda: made.fp8("channel"), fp8_by_token),
    "fp8 by tensor": (lambda: made.fp8("tensor"), fp8_by_token),
    "fp8 static": (lambda: made.fp8("tensor", static=True), fp8_static),
    "modelopt nvfp4": (lambda: made.modelopt_nvfp4(), None),
    "bnb nf4": (lambda: made.bitsandbytes(), None),
    "bnb nf4 nested": (lambda: made.bitsandbytes(nested=True), None),
    "bnb fp4 by 128": (lambda: made.bitsandbytes("fp4", nested=True, blocksize=128), None),
    "bnb int8": (lambda: made.bitsandbytes_int8(), None),
    "ct w4a16": (lambda: made.compressed("pack-quantized", INT4), None),
    "ct w4a16 zeros": (
        lambda: made.compressed("pack-quantized", {**INT4, "symmetric": False}),
        None,
    ),
    "ct w4a16 by row": (
        lambda: made.compressed(
            "pack-quantized", {**INT4, "strategy": "channel", "group_size": None}
        ),
        None,
    ),
    "ct w8a16": (lambda: made.compressed("pack-quantized", {**INT4, "num_bits": 8}), None),
    "ct w8a8": (lambda: made.compressed("int-quantized", INT8, TOKEN), int8_by_token),
    "ct w8a8 static": (
        lambda: made.compressed(
            "int-quantized",
            {**INT8, "strategy": "tensor"},
            {"num_bits": 8, "type": "int", "strategy": "tensor"},
        ),
        int8_static,
    ),
    "ct fp8": (
        lambda: made.compressed("float-quantized", FP8, {**TOKEN, "type": "float"}),
        fp8_by_token,
    ),
    "ct fp8 by block": (
        lambda: made.compressed(
            "float-quantized",
            {**FP8, "strategy": "block", "block_structure": [128, 128]},
            {**TOKEN, "type": "float", "strategy": "group", "group_size": 128},
        ),
        fp8_by_128,
    ),
    "ct nvfp4": (
        lambda: made.compressed(
            "nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group", "group_size": 16}
        ),
        None,
    ),
    "ct mxfp4": (
        lambda: made.compressed(
            "mxfp4-pack-quantized",
            {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
        None,
    ),
}
ON_INTEGERS = [
    "gptq", "gptq act-order", "gptq 8 bits", "awq by 128", "ct w4a16", "ct w8a8", "bnb nf4",
    "bnb fp4 by 128", "bnb int8",
]  # fmt: skip
ON_HALVES = ["fp8 by block", "fp8 by tensor"]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"))


def own_logits(folder: Path, **options: Any) -> torch.Tensor:
    """[prompts, vocab] log-probabilities of the token after each prompt."""
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(inputs, PARAMS, use_tqdm=False)
    rows = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    return torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])


def reference_logits(folder: Path, rounding: Rounding | None = None) -> torch.Tensor:
    """transformers' own on floats, with activations rounded before each quantized layer."""
    reference = Reference(folder)
    if rounding is not None:
        for name, module in reference.model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
    rows = [reference.logits(prompt)[-1].log_softmax(-1) for prompt in PROMPTS]
    return torch.stack(rows)


def relative_error(own: torch.Tensor, expected: torch.Tensor) -> float:
    return float((own - expected).std() / expected.std())


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_gives_the_logits_of_what_it_stands_for(
    name: str, floats: Path, tmp_path: Path
) -> None:
    make, rounding = FORMATS[name]
    quantized, restored = made.quantize(floats, tmp_path, *make())
    expected = reference_logits(restored, rounding)
    error = relative_error(own_logits(quantized, cpu_backend="torch"), expected)
    is_exact = rounding is None and name != "ct nvfp4"  # whose package gives floats as bfloat16
    assert error < (EXACT if is_exact else ROUNDED)
    if name in ON_INTEGERS:
        assert relative_error(own_logits(quantized), expected) < NATIVE
    if name in ON_HALVES:  # where activations are not rounded at all
        assert relative_error(own_logits(quantized), reference_logits(restored)) < 1e-3


def test_layers_of_exact_blocks_run_whole_in_the_library(floats: Path, tmp_path: Path) -> None:
    quantized, _ = made.quantize(floats, tmp_path, *made.gptq())
    with LLM(str(quantized), **OPTIONS) as llm:
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        assert all(layer.fused is not None for layer in model.model.layers)


@pytest.mark.parametrize("name", ["ct w4a16 zeros", "ct w8a8", "fp8 by block"])
def test_transformers_reads_the_same_from_the_checkpoint_itself(
    name: str, floats: Path, tmp_path: Path
) -> None:
    """Formats that transformers can read on a CPU, with the activations it rounds or not."""
    quantized, _ = made.quantize(floats, tmp_path, *FORMATS[name][0]())
    if name == "fp8 by block":
        as_floats = transformers.FineGrainedFP8Config(dequantize=True)
        reference = Reference(quantized, quantization_config=as_floats)
        reference.model.float()
    elif name == "ct w4a16 zeros":  # its layers of integers take no packed zero points
        as_floats = transformers.CompressedTensorsConfig(dequantize=True)
        reference = Reference(quantized, quantization_config=as_floats)
    else:
        reference = Reference(quantized)
    rows = [reference.logits(prompt)[-1].log_softmax(-1) for prompt in PROMPTS]
    own = own_logits(quantized, cpu_backend="auto" if name == "fp8 by block" else "torch")
    # Its int8 activations reach to 127.5, ours to 127: other numbers are rounded up.
    limits = {"ct w4a16 zeros": EXACT, "ct w8a8": 0.06, "fp8 by block": 1e-3}
    assert relative_error(own, torch.stack(rows)) < limits[name]


@pytest.mark.parametrize("name", [*ON_INTEGERS, *ON_HALVES])
def test_in_the_library_rows_are_the_same_alone_and_together(
    name: str, floats: Path, tmp_path: Path
) -> None:
    """To the bit: a request has many rows while its prompt is computed, and one afterwards."""
    quantized, _ = made.quantize(floats, tmp_path, *FORMATS[name][0]())
    own = own_logits(quantized)
    assert torch.equal(own_logits(quantized, max_num_batched_tokens=1), own)
    assert torch.equal(own_logits(quantized, max_num_batched_tokens=3), own)
