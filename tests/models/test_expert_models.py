"""Models with experts: what chunks, cached prefixes, preemption, backends and ranks must not
change. Their parity with transformers is in test_parity."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from drafters import Stubborn
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference, make_checkpoint

from penstock import SamplingParams
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.build import Build
from penstock.layers.experts import IMPLEMENTATIONS, Experts, ExpertsConfig
from penstock.models.experts import split_experts
from penstock.ops.cpu.dtypes import BLOCK_TYPES, FLOAT_TYPES
from penstock.ops.experts import Routing
from penstock.ops.registry import Ops
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.sampling import OutputKind

VARIANTS = ("qwen3_moe", "mixtral", "qwen2_moe")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = random_prompts(4, 3, 17, 40, 90)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def test_the_engine_around_them_changes_nothing(checkpoint: Path) -> None:
    with open_llm(checkpoint, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, max_num_batched_tokens=7) as llm:  # prompts in chunks
        assert greedy_tokens(llm, PROMPTS) == alone
    with open_llm(checkpoint) as llm:  # batched; then from the prefix cache
        assert greedy_tokens(llm, PROMPTS) == alone
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_prefix_hits > 0
    tight = {"max_model_len": 128, "num_gpu_blocks_override": 14, "async_scheduling": True}
    with open_llm(checkpoint, **tight) as llm:
        assert greedy_tokens(llm, PROMPTS) == alone
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("variant", ["qwen2_moe", "glm4_moe", "minimax_m2"])
def test_rows_are_the_same_bits_alone_and_together(variant: str, tmp_path: Path) -> None:
    """Routers and gates too: activations are rounded to 8 bits, which makes much of a last bit."""
    checkpoint = make_checkpoint(tmp_path, variant)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rows = []
    for num_tokens in (1, 3, 256):
        options = {"quantization": "int8", "enable_prefix_caching": False}
        with open_llm(checkpoint, max_num_batched_tokens=num_tokens, **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        rows.append([output.prompt_logprobs for output in outputs])
    assert rows[0] == rows[1] == rows[2]


def test_plain_torch_gives_transformers_tokens_too(checkpoint: Path) -> None:
    reference = Reference(checkpoint)
    with open_llm(checkpoint, cpu_backend="torch") as llm:
        ours = greedy_tokens(llm, PROMPTS)
    for prompt, own in zip(PROMPTS, ours, strict=True):
        assert reference.count_near_ties(prompt["prompt_token_ids"], own) == 0


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        pytest.param("qwen3_moe", "torch", marks=pytest.mark.slow),
        ("qwen2_moe", "auto"),
        pytest.param("llama4_unnormed", "auto", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_one_ranks_tokens(tmp_path: Path, variant: str, backend: str) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with open_llm(checkpoint, cpu_backend=backend) as llm:
        expected = greedy_tokens(llm, PROMPTS)
    with open_llm(checkpoint, cpu_backend=backend, tensor_parallel_size=2) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


def test_ranks_that_do_not_divide_an_expert_are_refused() -> None:
    config = ExpertsConfig(num_experts=4, hidden_size=8, intermediate_size=33, routing=Routing(2))
    build = Build(
        torch.float32, torch.device("cpu"), 64, Ops("cpu"), mesh=Mesh(RankGroup(rank=0, size=2))
    )
    with pytest.raises(ConfigError, match="intermediate size of 33"):
        Experts(build, config)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mixtral")
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(
        config.replace('"num_local_experts": 4', '"num_local_experts": 5')
    )
    with pytest.raises(ModelError, match=r"lacks|has shape"):
        open_llm(checkpoint)


def test_dummy_weights_need_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with open_llm(tmp_path, load_format="dummy") as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))


def test_the_debug_log_says_which_implementation_and_why_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    logger = logging.getLogger("penstock.models.decoder")
    logger.addHandler(caplog.handler)  # the package's own lines do not reach the root
    try:
        open_llm(checkpoint, cpu_backend="torch", log_level="debug").close()
    finally:
        logger.removeHandler(caplog.handler)
    own = [record.getMessage() for record in caplog.records if record.name == logger.name]
    (message,) = set(own)  # not one for every layer
    assert len(own) <= 2, "this handler's, and the root's if lines reach it"
    assert "torch: one matmul an expert" in message
    assert "not triton: it runs on GPUs, not on cpu" in message
    assert "not packed" in message


def test_routed_experts_are_those_of_transformers(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")  # its second layer of three has an MLP
    options = {  # prompts in chunks, and preemptions
        "max_num_batched_tokens": 9, "max_model_len": 128, "num_gpu_blocks_override": 14,
        "async_scheduling": True,
    }  # fmt: skip
    with open_llm(checkpoint, enable_return_routed_experts=True, **options) as llm:
        for _ in range(2):  # the prefix cache must not hide any
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
    model = Reference(checkpoint).model
    chosen: list[torch.Tensor] = []
    for layer in (0, 2):
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequence = prompt["prompt_token_ids"] + output.outputs[0].token_ids
        chosen.clear()
        with torch.inference_mode():
            model(torch.tensor([sequence[:-1]]))
        expected = torch.stack(chosen, dim=1)  # [tokens, layers, top_k]
        routed = output.outputs[0].routed_experts
        assert routed is not None
        assert routed.shape == (len(sequence) - 1, 2, 3)
        assert torch.equal(torch.tensor(routed).long(), expected)


def test_routed_experts_come_with_the_last_output_of_a_stream(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mixtral")
    params = SamplingParams(temperature=0, max_tokens=4, output_kind=OutputKind.DELTA)
    with open_llm(checkpoint, enable_return_routed_experts=True) as llm:
        outputs = list(llm.stream(PROMPTS[0], params))
    *others, last = [output.outputs[0].routed_experts for output in outputs]
    assert all(routed is None for routed in others)
    assert last is not None
    assert len(last) == 3 + 4 - 1


def test_routed_experts_are_not_those_of_drafts_that_fell(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    options = {"enable_return_routed_experts": True, "async_scheduling": True}
    routed = []
    for drafter in (None, Stubborn(2, 7)):
        with open_llm(checkpoint, drafter=drafter, **options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        routed.append([output.outputs[0].routed_experts for output in outputs])
    plain, drafted = routed
    for ours, theirs in zip(drafted, plain, strict=True):
        assert (ours == theirs).all()


def test_on_a_gpu_what_has_no_kernel_is_computed_without_waiting_for_the_device() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    build = Build(torch.bfloat16, torch.device("cuda"), 64, Ops("cpu"))  # nothing is allocated
    odd = ExpertsConfig(num_experts=4, hidden_size=8, intermediate_size=33, routing=Routing(2))
    by_name = {own.name.partition(":")[0]: own for own in IMPLEMENTATIONS}
    reasons = {name: own.refusal(build, odd) for name, own in by_name.items()}
    assert [name for name, reason in reasons.items() if reason is None] == ["dense"]
    assert "16 bytes" in str(reasons["triton"])
    even = dataclasses.replace(odd, intermediate_size=32)
    assert by_name["triton"].refusal(build, even) is None


def test_int8_quantizes_the_experts_and_not_their_router(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    with open_llm(checkpoint, quantization="int8") as llm:
        assert all(len(own) == 16 for own in greedy_tokens(llm, PROMPTS))
        executor = llm.engine.executor
        assert isinstance(executor, InProcessExecutor)
        (layer, *_) = [m for m in executor.worker.model.modules() if isinstance(m, Experts)]
        packed = {"gate": layer.gate, "expert": layer.experts["0"].gate_up_proj}
        types = {
            name: {part.type for part in linear.native.parts.values()}
            for name, linear in packed.items()
        }
    assert types == {"gate": {FLOAT_TYPES[torch.float32]}, "expert": {BLOCK_TYPES["Q8_0"]}}


@pytest.mark.parametrize("is_turned", [False, True])
def test_stacked_experts_are_split_in_either_layout(is_turned: bool) -> None:
    gate, up, down = torch.randn(3, 2, 5, 8)  # two experts [out, in]; down is turned below
    stacked = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down.transpose(1, 2)}
    if is_turned:
        stacked = {name: tensor.transpose(1, 2) for name, tensor in stacked.items()}
    named = [(f"model.layers.0.mlp.experts.{name}", own) for name, own in stacked.items()]
    found = dict(split_experts(named, "mlp", hidden_size=8))
    for expert in range(2):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        torch.testing.assert_close(found.pop(f"{prefix}.gate_proj.weight"), gate[expert])
        torch.testing.assert_close(found.pop(f"{prefix}.up_proj.weight"), up[expert])
        torch.testing.assert_close(found.pop(f"{prefix}.down_proj.weight"), down[expert].T)
    assert not found
