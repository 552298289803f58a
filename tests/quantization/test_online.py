"""--quantization: float checkpoints quantized while they load, without ever being there twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantized_checkpoints as made
import torch
from test_formats import own_logits, reference_logits, relative_error

from penstock import LLM, SamplingParams
from penstock.config.quantization import ONLINE
from penstock.distributed.mesh import Mesh
from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.linear import column_linear
from penstock.layers.quantization import DeferredQuantization, DenseMethod
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.plan import assign_methods
from penstock.loading.load import load_weights
from penstock.models.base import WeightTable
from penstock.ops.registry import Ops
from penstock.protocol.errors import ModelError


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.make_floats(tmp_path_factory.mktemp("floats"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(floats: Path) -> torch.Tensor:
    return reference_logits(floats)


@pytest.mark.parametrize("method", [name for name in ONLINE if name != "fp8_per_channel"])
def test_logits_are_near_those_of_the_floats(
    method: str, floats: Path, expected: torch.Tensor
) -> None:
    own = own_logits(floats, quantization=method, cpu_backend="torch")
    limit = 0.12 if method.startswith("fp8") else 0.03
    assert 1e-5 < relative_error(own, expected) < limit


def test_weights_can_be_made_up_in_any_method(floats: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(
        str(floats), quantization="fp8", load_format="dummy", skip_tokenizer_init=True,
        cpu_threads=1, max_model_len=64, log_level="error", cpu_backend="torch",
        kv_cache_memory_bytes=2**24,
    ) as llm:  # fmt: skip
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
        numbers = [b for n, b in model.named_buffers() if n.endswith("quantized_0_weight")]
    assert len(output.outputs[0].token_ids) == 2
    assert {tensor.dtype for tensor in numbers} == {torch.float8_e4m3fn}


NUM_LAYERS, SIZE = 24, 1024


def _model() -> torch.nn.Module:
    build = Build(
        torch.float32, torch.device("cpu"), 16, Ops("cpu"), Mesh(), DeferredQuantization()
    )
    model = torch.nn.Module()
    layers = [column_linear(build, SIZE, {"": SIZE}) for _ in range(NUM_LAYERS)]
    model.layers = torch.nn.ModuleList(layers)
    model.embed_tokens = VocabEmbedding(build, 8, SIZE)
    return model


def test_memory_holds_one_float_matrix_beside_the_quantized_model() -> None:
    """Counted by torch's own allocator: what was allocated and not freed, at its highest."""
    model = _model()
    quantization = choose_quantization({}, "fp8")
    assert quantization is not None
    assign_methods(model, quantization, DenseMethod())

    def tensors():  # type: ignore[no-untyped-def]
        for index in range(NUM_LAYERS):
            yield f"layers.{index}.weight", torch.randn(SIZE, SIZE) * 0.02
        yield "embed_tokens.weight", torch.zeros(8, SIZE)

    with torch.profiler.profile(profile_memory=True) as profile:
        load_weights(model, WeightTable(), tensors(), NUM_LAYERS + 1, show_progress=False)
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    matrix = SIZE * SIZE * 4
    quantized = NUM_LAYERS * SIZE * SIZE
    assert held >= quantized  # the count counts
    assert peak < quantized + 5 * matrix < NUM_LAYERS * matrix


@pytest.mark.parametrize("method", ["int8", "int8_per_channel", "fp8"])
def test_a_file_in_blocks_is_not_quantized_again(method: str, default_model: str) -> None:
    with pytest.raises(ModelError, match="a GGUF file is quantized already"):
        LLM(default_model, quantization=method, cpu_threads=1, max_model_len=64)
