"""The runner's seams, each driven by a stand-in for the feature that will use it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tiny_engine import OPTIONS
from tiny_models import make_checkpoint

from penstock import LLM, SamplingParams
from penstock.config import DeviceConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.context import ForwardContext, current_context, forward_context
from penstock.layers.linear import Linear, Part, Product, column_linear
from penstock.layers.quantization import Shard
from penstock.ops.registry import Ops
from penstock.platforms.platform import detect_platform
from penstock.protocol.step import ScheduledRequest, StepPlan

PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_build(**changes: object) -> Build:
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"))
    return build if not changes else Build(**{**build.__dict__, **changes})  # type: ignore[arg-type]


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(str(make_checkpoint(tmp_path, "llama")), **OPTIONS)


def executor_of(llm: LLM) -> InProcessExecutor:
    assert isinstance(llm.engine.executor, InProcessExecutor)
    return llm.engine.executor


class AddOne:
    """An adapter: adds a number chosen by the request's slot, read from the forward context."""

    def __init__(self) -> None:
        self.by_slot = torch.zeros(256)

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        return product(x) + self.by_slot[current_context().token_slots][:, None]


def test_an_adapter_changes_the_requests_in_its_slots_and_no_others(llm: LLM) -> None:
    before = llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    adapter = AddOne()
    layer = executor_of(llm).worker.model.model.layers[0].mlp.down_proj
    assert isinstance(layer, Linear)
    layer.adapter = adapter
    unchanged = llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in unchanged] == [o.outputs[0].token_ids for o in before]
    adapter.by_slot[:] = torch.arange(256) * 3.0  # slot 0 keeps its tokens
    # A prefix computed by another adapter must not be shared: adapters enter the hash.
    salted = [{**PROMPT, "cache_salt": str(index)} for index in range(2)]
    first, second = llm.generate(salted, GREEDY, use_tqdm=False)
    tokens = {tuple(first.outputs[0].token_ids), tuple(second.outputs[0].token_ids)}
    assert tuple(before[0].outputs[0].token_ids) in tokens
    assert len(tokens) == 2


def test_a_decode_steps_plan_is_small_whatever_the_prompt(llm: LLM) -> None:
    plan = StepPlan(
        step_id=10**6,
        scheduled=[ScheduledRequest(f"request-{index:08d}", 0, 1, True) for index in range(64)],
    )
    assert len(msgspec.msgpack.encode(plan)) < 64 * 32


def test_a_bidirectional_layer_needs_no_cache() -> None:
    build = make_build()
    layer = Attention(build, "encoder.0", 2, 2, 8, kind="bidirectional")
    assert layer.kv_spec("float32") is None
    query = torch.randn(5, 2, 8)
    starts = torch.tensor([0, 2, 5])
    nobody = torch.zeros(5, dtype=torch.int64)
    with forward_context(ForwardContext({}, {}, starts, nobody)):
        together = layer(query, query, query)
    with forward_context(ForwardContext({}, {}, torch.tensor([0, 2]), nobody)):
        alone = layer(query[:2], query[:2], query[:2])
    torch.testing.assert_close(together[:2], alone)


class Doubling:
    """A linear method that stores half the weight and doubles on use."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = layer.build.empty(layer.out_features, layer.in_features)

    def load(
        self, layer: Linear, part: str, parameter: str, tensor: torch.Tensor, shard: Shard
    ) -> None:
        layer.rows_of(layer.weight, part).copy_(shard.cut(tensor) / 2)

    def apply(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = 2 * (x @ layer.weight.T)
        return output if bias is None else output + bias


@torch.inference_mode()
def test_a_quantization_method_owns_how_weights_are_kept_and_used() -> None:
    weights = {"a": torch.randn(6, 4), "b": torch.randn(2, 4)}
    layers = [
        column_linear(make_build(), 4, {"a": 6, "b": 2}),
        column_linear(make_build(linear_method=Doubling()), 4, {"a": 6, "b": 2}),
    ]
    for layer in layers:
        for part, weight in weights.items():
            layer.load("weight", part, weight)
    x = torch.randn(3, 4)
    torch.testing.assert_close(layers[0](x), layers[1](x))
    assert not torch.equal(layers[0].weight, layers[1].weight)


@torch.inference_mode()
def test_shards_of_a_linear_layer_make_up_the_whole() -> None:
    weight, bias, x = torch.randn(8, 6), torch.randn(8), torch.randn(3, 6)
    whole = Linear(make_build(), 6, [Part("", 8, 1)], bias=True)
    whole.load("weight", "", weight)
    whole.load("bias", "", bias)
    by_rows = []
    for rank in range(2):
        layer = Linear(make_build(mesh=Mesh(RankGroup(rank, 2))), 6, [Part("", 8, 2)], bias=True)
        layer.load("weight", "", weight)
        layer.load("bias", "", bias)
        by_rows.append(layer(x))
    torch.testing.assert_close(torch.cat(by_rows, dim=1), whole(x))


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from penstock.protocol.errors import ConfigError

    with pytest.raises(ConfigError, match="device=cuda needs a CUDA GPU"):
        detect_platform(DeviceConfig(device="cuda"))
