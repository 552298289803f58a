"""Layers whose matrices stay in GGUF blocks: the product with the floats that they stand for.

With the reference's ops; those of GPUs are tested in tests/ops/gpu/test_triton_gguf.py, whole
engines on a GPU in tests/gpu/test_gpu_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf_builder import GRID_TYPES, random_blocks, write_gguf
from tiny_engine import greedy_tokens, open_llm

from penstock.config import LoadConfig, ModelConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import ExpertsConfig, choose_implementation
from penstock.layers.gguf import GgufMethod
from penstock.layers.gguf_experts import GgufExperts
from penstock.layers.linear import Linear, column_linear, row_linear
from penstock.loading.gguf.config import map_tensors
from penstock.loading.gguf.dequant import FLOAT_DTYPES
from penstock.loading.gguf.file import GGML_TYPES, GGUFFile, GGUFTensor
from penstock.loading.source import resolve_source
from penstock.models import assembly
from penstock.models.backend import ModelBackend, _gguf_on_gpu
from penstock.ops import reference
from penstock.ops.blocks import BlockTensor, Weight
from penstock.ops.experts import Routing, run_by_expert
from penstock.ops.gguf_blocks import FORMATS, dequantize
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError

BY_NAME = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
CPU = torch.device("cpu")
IN = 256


def a_build(rank: int = 0, ranks: int = 1, expert_blocks: bool = True) -> Build:
    return Build(
        torch.float32, CPU, 16, Ops("cpu"), Mesh(RankGroup(rank, ranks)), GgufMethod(expert_blocks)
    )


def a_matrix(type_name: str, rows: int, columns: int = IN) -> tuple[Weight, torch.Tensor]:
    """As a checkpoint gives it, and its floats."""
    data = random_blocks(np.random.default_rng(rows), type_name, rows, columns)
    raw = torch.from_numpy(data)
    if type_name in FLOAT_DTYPES:
        floats = raw.view(FLOAT_DTYPES[type_name])
        return floats, floats.float()
    blocks = BlockTensor(*BY_NAME[type_name], raw)
    return blocks, dequantize(blocks)


@pytest.mark.parametrize(
    ("types", "count"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 2),
        (("Q4_0", "Q4_1", "Q8_0"), 3),
        (("Q5_K", "Q5_K", "Q5_K"), 1),
        (("F16", "BF16", "Q4_K"), 2),
        (("IQ3_S", "IQ3_S", "IQ1_M"), 2),
        (("F32", "F32", "F32"), 1),
    ],
)
def test_fused_parts_may_be_of_different_types(types: tuple[str, ...], count: int) -> None:
    layer = column_linear(a_build(), IN, {"q": 24, "k": 8, "v": 8}, bias=True)
    floats, biases = [], []
    for (part, rows), type_name in zip(layer.part_rows.items(), types, strict=True):
        weight, own = a_matrix(type_name, rows)
        layer.load("weight", part, weight)
        biases.append(torch.randn(rows))
        layer.load("bias", part, biases[-1])
        floats.append(own)
    assert len(layer.gguf.matrices) == count
    x = torch.randn(3, IN)
    expected = torch.nn.functional.linear(x, torch.cat(floats), torch.cat(biases))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("type_name", ["Q6_K", "Q4_1", "F16", "IQ3_XXS"])
def test_an_embedding_reads_rows_and_projects_with_them(type_name: str) -> None:
    layer = VocabEmbedding(a_build(), 20, IN)
    weight, floats = a_matrix(type_name, 20)
    layer.load("weight", "", weight)
    ids = torch.tensor([3, 19, 3])
    assert torch.equal(layer(ids), floats[ids])
    hidden = torch.randn(2, IN)
    torch.testing.assert_close(layer.project(hidden), hidden @ floats.T)
    out = torch.empty(2, 20)
    assert layer.project(hidden, out) is out
    torch.testing.assert_close(out, hidden @ floats.T)


def test_the_models_size_counts_blocks() -> None:
    layer = column_linear(a_build(), IN, {"a": 8, "b": 8})
    layer.load("weight", "a", a_matrix("Q4_K", 8)[0])
    layer.load("weight", "b", a_matrix("Q6_K", 8)[0])
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 8 * (144 + 210)


@pytest.mark.parametrize("make", [column_linear, row_linear])
def test_ranks_hold_their_rows_or_columns(make: Callable[..., Linear]) -> None:
    weight, floats = a_matrix("Q4_K", 16, 2 * IN)
    shards = []
    for rank in range(2):
        build = a_build(rank, 2)
        if make is column_linear:
            layer = column_linear(build, 2 * IN, {"": 16})
        else:
            layer = row_linear(build, 2 * IN, 16)
        layer.load("weight", "", weight)
        x = torch.eye(layer.in_features)
        shards.append(layer.method.apply(layer, x, None).T)
    whole = torch.cat(shards, dim=0 if make is column_linear else 1)
    torch.testing.assert_close(whole, floats)


def test_a_border_inside_a_block_is_refused() -> None:
    layer = row_linear(a_build(0, 2), IN, 16)
    with pytest.raises(ModelError, match="falls inside a Q4_K block"):
        layer.load("weight", "", a_matrix("Q4_K", 16)[0])


# -- experts


def an_experts_config(**settings: Any) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=3, hidden_size=IN, intermediate_size=2 * IN, routing=Routing(2), **settings
    )


def by_matmuls(layer: GgufExperts, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """One expert, as for rows with an adapter."""
    both = layer.linear(expert, "gate_up", rows)
    return layer.linear(expert, "down", reference.silu_mul(both))


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K", "Q8_0")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_stay_in_their_blocks(types: tuple[str, ...], ranks: int) -> None:
    config = an_experts_config()
    shapes = {"gate_proj": (2 * IN, IN), "up_proj": (2 * IN, IN), "down_proj": (IN, 2 * IN)}
    tensors, floats = {}, {}
    for (name, (rows, columns)), type_name in zip(shapes.items(), types, strict=True):
        whole, own = a_matrix(type_name, 3 * rows, columns)
        assert isinstance(whole, BlockTensor)
        floats[name] = own.view(3, rows, columns) / 100
        tensors[name] = [whole.rows(e * rows, (e + 1) * rows) for e in range(3)]
    x = torch.randn(5, IN)
    weights, ids = reference.route(torch.randn(5, 3), config.routing)
    output, singly = torch.zeros(2, 5, IN)
    for rank in range(ranks):
        build = a_build(rank, ranks)
        implementation, _ = choose_implementation(build, config)
        layer = implementation.make(build, config)
        assert isinstance(layer, GgufExperts)
        assert len(layer.expected()) == 9
        for name, parts in tensors.items():
            for expert, part in enumerate(parts):
                layer.load("weight", f"experts.{expert}.{name}", part)
        assert len(layer.gate_up) == (1 if types[0] == types[1] else 2)
        output += layer(x, weights, ids)
        singly += run_by_expert(x, weights, ids, config.num_experts, partial(by_matmuls, layer))
        for own, other in zip(layer.tensors_of(0), layer.tensors_of(2), strict=True):
            own.copy_(other)  # as another rank's copy gets them
        assert torch.equal(*(by_matmuls(layer, expert, x) for expert in (0, 2)))
    torch.testing.assert_close(singly, output)
    gate_up = torch.cat([floats["gate_proj"], floats["up_proj"]], dim=1) * 100
    expected = reference.experts(x, weights, ids, gate_up, floats["down_proj"] * 100, "silu")
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("build", "settings", "reason"),
    [(a_build(expert_blocks=False), {}, "not in blocks"), (a_build(), {"bias": True}, "biases")],
)
def test_other_experts_become_floats_at_load(
    build: Build, settings: dict[str, Any], reason: str
) -> None:
    implementation, why = choose_implementation(build, an_experts_config(**settings))
    assert reason in why
    layer = implementation.make(build, an_experts_config(**settings))
    assert not isinstance(layer, GgufExperts)


@pytest.mark.parametrize(("types", "stay"), [(("Q4_K", "Q6_K"), True), (("Q4_K", "F16"), False)])
def test_on_a_gpu_experts_stay_in_blocks_if_all_of_them_are(
    types: tuple[str, ...], stay: bool, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    names = ("blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight")
    tensors = {
        name: GGUFTensor(name, BY_NAME[own], (2, IN, IN), 0, 0)
        for name, own in zip(names, types, strict=True)
    }
    tensors["blk.0.ffn_gate_inp.weight"] = GGUFTensor("", BY_NAME["F32"], (2, IN), 0, 0)
    backend = _gguf_on_gpu(GGUFFile(tmp_path, {}, tensors), torch.bfloat16)
    assert isinstance(backend.linear_method, GgufMethod)
    assert backend.linear_method.expert_blocks is stay
    assert {"Q4_K", "IQ4_XS", "F16"} < set(backend.native_types)


# -- an engine


def in_blocks(*_: Any) -> ModelBackend:
    """What a GPU gets, on a CPU with torch."""
    return ModelBackend(
        Ops("cpu"), GgufMethod(), torch.float32, native_types=(*FORMATS, *FLOAT_DTYPES)
    )


@pytest.mark.parametrize(
    ("arch", "type_name"), [("llama", "Q4_K"), ("qwen3", "Q5_0"), ("llama", "IQ2_S")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_gives_the_tokens_of_the_dequantized_file(
    arch: str, type_name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, arch, type_name, tied=tied)
    prompts = [{"prompt_token_ids": [n % 40 for n in range(2, length)]} for length in (3, 30)]
    options = {"cpu_backend": "torch", "max_model_len": 64}
    with open_llm(path, gguf_compute="dequantize", **options) as llm:
        expected = greedy_tokens(llm, prompts)
    monkeypatch.setattr(assembly, "choose_backend", in_blocks)
    with open_llm(path, **options) as llm:
        assert greedy_tokens(llm, prompts) == expected


def test_a_file_of_all_types_with_tables_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, "qwen3", types=GRID_TYPES, tied=False)
    source = resolve_source(ModelConfig(model=str(path)), LoadConfig())
    assert source.gguf is not None
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**source.config)).eval()
    mapped = map_tensors(source.gguf, source.config)
    theirs.load_state_dict({one.name: torch.from_numpy(written[one.tensor.name]) for one in mapped})
    prompt = [n % 40 for n in range(2, 30)]
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    with open_llm(path, max_model_len=64, kv_cache_dtype="float32") as llm:
        ours = greedy_tokens(llm, [{"prompt_token_ids": prompt}], 8)
    assert ours == [expected[0, len(prompt) :].tolist()]
