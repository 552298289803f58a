"""Everything at once: requests that use every feature, some with LoRA adapters and images, in
engines with any options, among aborts, failing steps and drafts. Each gives what it gives alone,
and nothing is kept of it."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from drafters import Oracle
from eagle_heads import make_eagle, make_head
from lora.adapters import STACKED, make_adapter
from medusa_heads import make_heads
from mtp_targets import make_target
from structured.byte_model import VOCAB_SIZE, make_byte_tokenizer, open_llm
from tiny_engine import as_replay
from tiny_models import make_checkpoint
from tiny_vision import InProcessMedia, make_vision_checkpoint, picture

from penstock import LLM, SamplingParams
from penstock import StructuredOutputsParams as Structured
from penstock.engine.core import EngineCore
from penstock.engine.lora_requests import with_adapters
from penstock.executor.in_process import InProcessExecutor
from penstock.kvcache.layout import blocks_for_request, plan_groups
from penstock.loading.adapters.source import adapter_digest
from penstock.media.content import read_multi_modal_data
from penstock.protocol.adapter import Adapter
from penstock.protocol.errors import OutOfMemory
from penstock.protocol.kv import AnyKVCacheSpec
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import OutputKind
from penstock.protocol.step import StepPlan
from penstock.runner.drafter import Drafter
from penstock.runner.drafters.draft_model import DraftModelDrafter
from penstock.runner.layout import StepLayout
from penstock.runner.runner import ModelRunner
from penstock.scheduler.request import RequestState
from penstock.structured.output import OutputGrammar
from penstock.text.frontend import PreparedRequest

TEXT_VARIANTS = ["llama", "qwen2_windowed", "deepseek_v2_lite", "qwen3_next", "mimo"]
WITH_IMAGES = "qwen2_vl"
VARIANTS = [*TEXT_VARIANTS, WITH_IMAGES]
MAX_MODEL_LEN = 96
GRAMMARS = [
    Structured(regex="(ab|é€|x[0-9]{3}){4}!"),
    Structured(choice=["first", "second", "third"]),
    Structured(json_object=True),
    Structured(regex="[0-9]{5}", reasoning_end="7"),
]
ADAPTED: dict[str, dict[str, Any]] = {  # the layers that adapters change
    "llama": {"target_modules": "all-linear"},
    "qwen2_windowed": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "deepseek_v2_lite": {
        "target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
        "target_parameters": STACKED,
    },
    "qwen3_next": {
        "target_modules": ["q_proj", "out_proj", "o_proj"],
        "target_parameters": STACKED,
    },
    "mimo": {"target_modules": ["q_proj", "o_proj", "down_proj"]},
    WITH_IMAGES: {"target_modules": ["q_proj", "o_proj", "down_proj"]},
}
SPECULATION: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 4},
    {"method": "custom", "model": "drafters:AtRandom"},
]
WITH_EXPERTS = ("deepseek_v2_lite", "qwen3_next")
TARGETS_WITH_MTP = {"mimo": 2, "qwen3_next": 1}  # layers
NUM_ADAPTERS = 3  # more than slots
FIRST_TOKEN = 9  # after all special tokens
IMAGE = [5, 7, 6]  # the placeholder and what surrounds it
IMAGE_SHAPES = ((56, 56), (56, 112))  # 4 and 8 tokens
MAX_IMAGE_LEN = 10
TOLERANCE = 1e-3  # of logprobs, where rows' numbers depend on the batch in their last bits


class Case(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    images: Sequence[Any] = ()


@dataclass
class Model:
    path: Path
    specs: dict[str, AnyKVCacheSpec]
    cases: list[Case]
    adapters: list[Adapter | None]  # of the cases
    alone: list[RequestOutput]
    speculation: list[dict[str, Any]]  # what may draft for it

    @property
    def has_experts(self) -> bool:
        return self.alone[0].outputs[0].routed_experts is not None


def some_params(rng: random.Random, most: int) -> SamplingParams:
    """Any features together that do not cannot be combined."""

    def perhaps(share: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < share else {}

    def letters() -> list[str]:
        return [chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 12))]

    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "seed": rng.randrange(2**40),
        "max_tokens": min(rng.choice([1, 2, 7, 16, 30]), most),
        **perhaps(0.3, top_p=0.9),
        **perhaps(0.3, top_k=rng.choice([1, 5, 30])),
        **perhaps(0.3, repetition_penalty=rng.choice([0.8, 1.3])),
        **perhaps(0.3, presence_penalty=0.5, frequency_penalty=-0.3),
        **perhaps(0.2, stop_token_ids=rng.sample(range(5, VOCAB_SIZE), 20)),
        **perhaps(0.3, stop=letters(), include_stop_str_in_output=rng.random() < 0.5),
        **perhaps(0.4, logprobs=rng.choice([0, 3])),
        **perhaps(0.2, logprob_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([1, 5]))),
        **perhaps(0.2, prompt_logprobs=rng.choice([0, 2])),
        **perhaps(0.2, n=2),
    }
    if rng.random() < 0.3:
        fields["structured_outputs"] = rng.choice(GRAMMARS)
    else:
        fields |= perhaps(0.2, bad_words=letters())
        fields |= perhaps(0.2, logit_bias={rng.randrange(VOCAB_SIZE): 4.0, 30: -80.0})
        fields |= perhaps(0.2, allowed_token_ids=rng.sample(range(VOCAB_SIZE), 60))
        fields |= perhaps(0.3, min_tokens=fields["max_tokens"] // 2)
    return SamplingParams(**fields)


def some_cases(rng: random.Random, count: int, with_images: bool) -> list[Case]:
    """Prompts that begin alike, for a while. Some have images, and some of these the same ones."""
    text = [rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(66)]
    cases = []
    for _ in range(count):
        length = rng.choice([1, 2, 8, 17, 40, 66])
        fork = rng.randrange(length + 1) if rng.random() < 0.4 else length
        rest = [rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(length - fork)]
        prompt, images = text[:fork] + rest, []
        while with_images and len(images) < 2 and rng.random() < 0.6:
            at = min(rng.choice([4, 12]), len(prompt))
            prompt[at:at] = IMAGE
            images.insert(0, picture(*rng.choice(IMAGE_SHAPES), seed=rng.randrange(2)))
            length += MAX_IMAGE_LEN
        cases.append(Case(prompt, some_params(rng, MAX_MODEL_LEN - length), images))
    return cases


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    with_images = request.param == WITH_IMAGES
    if with_images:
        path = make_vision_checkpoint(folder, request.param)
    else:
        make, options = make_checkpoint, {}
        if request.param in TARGETS_WITH_MTP:
            make, options = make_target, {"num_mtp_layers": TARGETS_WITH_MTP[request.param]}
        path = make(folder, request.param, vocab_size=VOCAB_SIZE, **options)
        make_byte_tokenizer().save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    cases = some_cases(random.Random(request.param), 14, with_images)
    variants = [None, *(some_adapter(path, request.param, seed) for seed in range(NUM_ADAPTERS))]
    adapters = [variants[index % len(variants)] for index in range(len(cases))]
    options = {"enable_prefix_caching": False, "max_num_seqs": 2}
    options["enable_return_routed_experts"] = request.param in WITH_EXPERTS
    with engine(path, **options) as llm:
        alone = [run_alone(llm, case, own) for case, own in zip(cases, adapters, strict=True)]
        plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        text = Case(list(range(FIRST_TOKEN, 40)), plain)
        by_variant = [run_alone(llm, text, variant) for variant in variants]
        specs = llm.engine.executor.capabilities.kv_specs
    assert len({tuple(output.outputs[0].token_ids) for output in by_variant}) == len(variants)
    assert [output.error for output in alone] == [None] * len(alone)
    return Model(path, specs, cases, adapters, alone, some_speculation(path, request.param))


def some_speculation(path: Path, variant: str) -> list[dict[str, Any]]:
    """Methods with heads of their own, besides those that need none."""
    found = [*SPECULATION]
    if variant in ("llama", "qwen2_windowed", WITH_IMAGES):
        target = path / "language"  # the settings of the language model, at the top
        target.mkdir()
        settings = json.loads((path / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(settings.get("text_config", settings)))
        head, _ = make_head(path / "eagle3", target, embeds=True)
        found.append({"method": "eagle3", "model": str(head)})
        found.append({"method": "eagle", "model": str(make_eagle(path / "eagle", target))})
        found.append({"method": "medusa", "model": str(make_heads(path / "medusa", target))})
    if variant in TARGETS_WITH_MTP:
        found += [{"method": "mtp", "num_speculative_tokens": count} for count in (1, 3)]
    return found


def some_adapter(checkpoint: Path, variant: str, seed: int) -> Adapter:
    folder = checkpoint / f"adapter-{seed}"
    auto = "AutoModelForImageTextToText" if variant == WITH_IMAGES else "AutoModelForCausalLM"
    make_adapter(folder, checkpoint, seed, auto, r=4, **ADAPTED[variant])
    return Adapter(folder.name, adapter_digest(folder), str(folder))


def prepare(
    llm: LLM, request_id: str, case: Case, adapter: Adapter | None, **options: Any
) -> PreparedRequest:
    params = msgspec.structs.replace(case.params, output_kind=OutputKind.FINAL_ONLY)
    if case.images:
        options["media"] = read_multi_modal_data({"image": list(case.images)}, None)
    request = llm.frontend.prepare(request_id, case.prompt, params, **options)
    return with_adapters([request], [adapter])[0]


def run_alone(llm: LLM, case: Case, adapter: Adapter | None) -> RequestOutput:
    return llm._run([prepare(llm, "alone", case, adapter)], use_tqdm=False)[0]


def engine(path: Path, **options: Any) -> LLM:
    settings = {"max_model_len": MAX_MODEL_LEN, "enable_lora": True, "max_loras": 2, **options}
    llm = open_llm(str(path), **settings)
    if llm.frontend.media is not None:
        llm.frontend.media.pool = InProcessMedia(path)
    return llm


def some_options(rng: random.Random, specs: dict[str, AnyKVCacheSpec]) -> dict[str, Any]:
    """Small blocks and steps, and a cache that holds one request and hardly another."""
    block_size, step_tokens = rng.choice([1, 4, 16]), rng.choice([3, 7, 32, 256])
    groups, _ = plan_groups(specs, block_size, MAX_MODEL_LEN)
    needed = blocks_for_request(groups, MAX_MODEL_LEN, max_step_tokens=step_tokens)
    return {
        "block_size": block_size,
        "max_num_batched_tokens": step_tokens,
        "num_gpu_blocks_override": needed + 1 + rng.choice([0, 2, 12]),
        "max_num_seqs": rng.choice([1, 2, 16]),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "priority", "fair"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 5]),
        "async_scheduling": rng.random() < 0.7,
        "max_loras": rng.choice([1, 2]),
        "max_cpu_loras": rng.choice([2, 3]),
    }


def fail_sometimes(runner: ModelRunner, rng: random.Random) -> None:
    """Steps of several requests fail, and steps of several tokens want for memory."""
    apply, run = runner._apply, runner.steps.run

    def fail_or_apply(plan: StepPlan) -> None:
        if rng.random() < 0.04 and len(plan.scheduled) > 1:
            raise RuntimeError("made up: before anything was done")
        apply(plan)

    def run_or_fail(layout: StepLayout, handed: Any = None) -> Any:
        computed = run(layout, handed)
        if rng.random() < 0.04 and layout.num_rows > 1:
            raise OutOfMemory("made up: after the step was computed")
        return computed

    runner._apply = fail_or_apply  # type: ignore[method-assign]
    runner.steps.run = run_or_fail  # type: ignore[method-assign]


@dataclass
class Client:
    """Sends cases at any time, some of them as replays; aborts some; compares what comes."""

    llm: LLM
    model: Model
    rng: random.Random
    waiting: list[int]  # indexes of cases
    num_compared: int = 0
    num_aborts: int = 0
    sent: dict[str, tuple[PreparedRequest, int]] = field(default_factory=dict)

    def run(self) -> None:
        while self.waiting or self.sent:
            for _ in range(min(self.rng.choice([0, 0, 1, 5]), len(self.waiting))):
                self.send(self.waiting.pop())
            if self.sent and self.num_aborts < 4 and self.rng.random() < 0.02:
                self.num_aborts += 1
                request, _ = self.sent.pop(self.rng.choice(list(self.sent)))
                self.llm._withdraw([request])
            if self.rng.random() < 0.02:
                self.llm.reset_prefix_cache()
            self.llm._step()
            for request_id, (request, index) in list(self.sent.items()):
                if request.assembler.finished:
                    del self.sent[request_id]
                    self.compare(request, index)
        self.llm._withdraw([])

    def send(self, index: int) -> None:
        case = self.model.cases[index]
        seen: list[int] = []
        if case.params.n == 1 and self.rng.random() < 0.3:
            tokens = self.model.alone[index].outputs[0].token_ids
            seen = tokens[: self.rng.randrange(len(tokens))]
        request = prepare(
            self.llm,
            str(len(self.waiting)),
            case,
            self.model.adapters[index],
            priority=self.rng.randrange(3),
            cache_salt=self.rng.choice([None, None, "salt"]),
        )
        if seen:
            request = as_replay(request, seen)
        self.sent[request.request_id] = request, index
        self.llm._submit([request])

    def compare(self, request: PreparedRequest, index: int) -> None:
        output, alone = request.assembler.take(), self.model.alone[index]
        assert output is not None
        assert output.error is None
        for ours, expected in zip(output.outputs, alone.outputs, strict=True):
            assert ours.token_ids == expected.token_ids
            assert ours.text == expected.text
            assert ours.finish_reason == expected.finish_reason
            assert ours.stop_reason == expected.stop_reason
            if expected.logprobs is not None:
                assert ours.logprobs is not None
                num_seen = len(expected.logprobs) - len(ours.logprobs)  # by a replay's client
                assert_close(ours.logprobs, expected.logprobs[num_seen:])
            if self.llm.frontend.needs_every_row:  # to return the experts of each
                assert ours.routed_experts is not None
                assert expected.routed_experts is not None
                assert ours.routed_experts.tolist() == expected.routed_experts.tolist()
        assert_close(output.prompt_logprobs, alone.prompt_logprobs)
        self.num_compared += 1


def assert_close(ours: Any, expected: Any) -> None:
    """Logprobs by position, of which a prompt's first has none."""
    assert (ours is None) == (expected is None)
    for own, other in zip(ours or [], expected or [], strict=True):
        assert (own is None) == (other is None)
        values, others = (
            sorted(entry.logprob for entry in (at or {}).values()) for at in (own, other)
        )
        assert values == pytest.approx(others, abs=TOLERANCE)


def assert_nothing_is_kept(llm: LLM) -> None:
    assert not llm._collector
    for core in getattr(llm.engine, "cores", [llm.engine]):
        assert_core_keeps_nothing(core)


def assert_core_keeps_nothing(core: EngineCore) -> None:
    scheduler = core.scheduler
    pool = scheduler.kv.pool
    assert not core.has_work()
    assert (pool.num_free, pool.num_draining) == (pool.num_usable, 0)
    assert not scheduler.kv._holdings
    if isinstance(core.executor, InProcessExecutor):
        assert set(core.executor.runner.tables.request_ids) <= set(scheduler._released_ids)
    gc.collect()
    kinds = (RequestState, OutputGrammar)
    for start in (scheduler, core.grammars, core.executor):
        assert not [thing for thing in reachable(start) if type(thing) in kinds]


def reachable(start: object) -> list[object]:
    """What an object holds on to, within this package's and Python's own containers."""
    found, waiting = {id(start): start}, [start]
    while waiting:
        for thing in gc.get_referents(waiting.pop()):
            module = type(thing).__module__
            is_ours = module.startswith("penstock") or type(thing) in (list, dict, set, tuple)
            if (is_ours or module == "collections") and id(thing) not in found:
                found[id(thing)] = thing
                waiting.append(thing)
    return list(found.values())


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_request_gives_what_it_gives_alone(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    options = some_options(rng, model.specs)
    options["enable_return_routed_experts"] = model.has_experts and rng.random() < 0.2
    outputs = [list(out.token_ids) for output in model.alone for out in output.outputs]
    drafter: Drafter | None = None
    if rng.random() < 0.8:
        options["speculative_config"] = copy(rng.choice([None, None, *model.speculation]))
        if options["speculative_config"] is not None:
            options["speculative_config"]["adaptive"] = rng.random() < 0.3
        elif rng.random() < 0.5:
            drafter = DraftModelDrafter(str(model.path), rng.choice([1, 4]))
        else:
            drafter = Oracle(outputs, 7, rng.choice([1, 3]), rng.choice([3, 4]))
    waiting = rng.sample(range(len(model.cases)), len(model.cases))
    with engine(model.path, drafter=drafter, **options) as llm:
        if rng.random() < 0.3:
            executor = llm.engine.executor
            assert isinstance(executor, InProcessExecutor)
            fail_sometimes(executor.runner, rng)
        client = Client(llm, model, rng, waiting)
        client.run()
        assert client.num_compared + client.num_aborts == len(model.cases)
        assert_nothing_is_kept(llm)
        if isinstance(drafter, DraftModelDrafter):
            assert not hasattr(drafter.model, "visual"), "a tower that nobody uses"
