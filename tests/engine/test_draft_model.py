"""A draft model: the same tokens as without one, and a model that drafts for itself is right."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drafters import Recording
from sampling_kinds import KINDS
from tiny_engine import open_llm, prepare_replay, tokens_and_logprobs
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models
from torch import nn

from penstock import LLM, SamplingParams
from penstock.executor.in_process import InProcessExecutor
from penstock.layers.matrix import MatrixLayer
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafters.draft_model import DraftModelDrafter
from penstock.scheduler.plan import PlannedStep

LENGTHS = (3, 17, 40, 90)
Results = list[tuple[list[int], list[dict[int, float]]]]


class Watched(Recording, DraftModelDrafter):
    """Remembers what it proposed after which tokens, and how many rows it computed."""

    def __init__(self, model: Path | str, num_drafts: int = 3) -> None:
        super().__init__(str(model), num_drafts)
        self.num_rows = 0

    def _forward(self, batch: Any, first: Any, counts: Any) -> Any:
        self.num_rows += int(counts.sum())
        return super()._forward(batch, first, counts)

    def judge(self, texts: Sequence[list[int]]) -> tuple[int, int]:
        """How many drafts there were for positions of these texts, and how many were right."""
        num_drafts = num_right = 0
        for known, drafts in self.proposals:
            if any(known[: len(text)] == text for text in texts):
                continue  # the request has ended, and the last step went past its end
            following = [text[len(known) :] for text in texts if text[: len(known)] == known]
            assert following, "something was proposed for no request"
            right = [
                [draft == token for draft, token in zip(drafts, rest, strict=False)]
                for rest in following
            ]
            best = max(right, key=sum)
            num_drafts, num_right = num_drafts + len(best), num_right + sum(best)
        return num_drafts, num_right


def draft_in_every_step(llm: LLM) -> LLM:
    """Otherwise measured times would decide how often."""
    speculation, num_drafts = llm.engine.scheduler.speculation, llm.engine.limits.num_drafts

    def plan(step: PlannedStep, running: object) -> None:
        step.num_drafts = num_drafts

    speculation.plan = plan  # type: ignore[method-assign]
    speculation.num_to_verify = lambda state: state.num_drafts  # type: ignore[method-assign]
    return llm


def open_drafting(model: Path | str, drafter: Watched, **options: Any) -> LLM:
    return draft_in_every_step(open_llm(model, drafter=drafter, **options))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of another architecture with the same vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    return make_checkpoint(folder, "qwen3", num_hidden_layers=1)


def prompts(seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


def run(llm: LLM) -> Results:
    """Tokens and logprobs of every prompt under every kind of sampling, all at once."""
    pairs = [
        (p, SamplingParams(max_tokens=24, logprobs=2, **o))
        for o in KINDS.values()
        for p in prompts()
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in pairs], [p for _, p in pairs], use_tqdm=False
    )
    results = []
    for output in outputs:
        (answer,) = output.outputs
        rows = answer.logprobs or []
        results.append(
            (
                list(answer.token_ids),
                [{token: entry.logprob for token, entry in row.items()} for row in rows],
            )
        )
    return results


def texts(results: Results) -> list[list[int]]:
    wanted = [prompt for _ in KINDS for prompt in prompts()]
    return [prompt + tokens for prompt, (tokens, _) in zip(wanted, results, strict=True)]


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> Results:
    with open_llm(tiny_llama) as llm:
        return run(llm)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 12},
    "tokens one by one": {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 1},
    "few blocks": {"max_model_len": 128, "num_gpu_blocks_override": 14},
    "one slot": {"max_num_seqs": 1},
    "blocks of one": {"block_size": 1},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_llama: str, expected: Results, options: dict[str, Any], overlap: bool
) -> None:
    drafter = Watched(tiny_llama)
    with open_drafting(tiny_llama, drafter, async_scheduling=overlap, **options) as llm:
        assert run(llm) == expected
        if "num_gpu_blocks_override" in options:
            assert llm.engine.stats().num_preemptions > 0
        assert llm.engine.stats().kv_cache_usage == 0.0
    num_drafts, num_right = drafter.judge(texts(expected))
    assert num_right == num_drafts > 50


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_another_draft_model_gives_the_same_tokens(
    tiny_llama: str, other: Path, expected: Results, num_drafts: int, overlap: bool
) -> None:
    drafter = Watched(other, num_drafts)
    options = {"max_model_len": 160, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 48}
    with open_drafting(tiny_llama, drafter, async_scheduling=overlap, **options) as llm:
        assert run(llm) == expected
    num_all, num_right = drafter.judge(texts(expected))
    assert num_right < num_all / 2


def test_drafts_after_a_prefix_hit_are_as_good_and_take_no_second_prefill(
    tiny_llama: str, expected: Results
) -> None:
    drafter = Watched(tiny_llama)
    with open_drafting(tiny_llama, drafter) as llm:
        run(llm)
        cold, drafter.num_rows = drafter.num_rows, 0
        drafter.proposals.clear()
        before = llm.engine.stats().num_prefix_hits
        assert run(llm) == expected
        num_cached = llm.engine.stats().num_prefix_hits - before
    assert drafter.num_rows <= cold - num_cached // 2
    num_drafts, num_right = drafter.judge(texts(expected))
    assert num_right == num_drafts > 100


def test_cached_blocks_that_lack_draft_rows_are_filled_by_the_next_request(
    tiny_llama: str,
) -> None:
    """The first request ends at its first token, long before the drafter has read its prompt."""
    prompt = prompts()[3]
    drafter = Watched(tiny_llama)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    with open_llm(tiny_llama) as llm:
        want = generate(llm, prompt, max_tokens=40, **greedy)
    with open_drafting(tiny_llama, drafter, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        generate(llm, prompt, max_tokens=1, **greedy)
        drafter.proposals.clear()
        assert generate(llm, prompt, max_tokens=40, **greedy) == want
        assert llm.engine.stats().num_prefix_hits > 64
    num_drafts, num_right = drafter.judge([prompt + want])
    assert num_right == num_drafts > 20


def generate(llm: LLM, prompt: list[int], **options: Any) -> list[int]:
    params = SamplingParams(**options)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_steps_without_drafts_are_caught_up_with(tiny_llama: str) -> None:
    """Now and then no drafts are asked for, or fewer, as under load."""
    drafter = Watched(tiny_llama, num_drafts=4)
    prompt = prompts()[2]
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 80, "ignore_eos": True}
    with open_llm(tiny_llama) as llm:
        want = generate(llm, prompt, **options)
    with open_drafting(tiny_llama, drafter) as llm:
        speculation, rng = llm.engine.scheduler.speculation, random.Random(1)

        def plan(step: PlannedStep, running: object) -> None:
            step.num_drafts = rng.choice([0, 0, 1, 2, 4])

        speculation.plan = plan  # type: ignore[method-assign]
        speculation.num_to_verify = (  # type: ignore[method-assign]
            lambda state: rng.randint(0, state.num_drafts)
        )
        assert generate(llm, prompt, **options) == want
    num_drafts, num_right = drafter.judge([prompt + want])
    assert num_right == num_drafts > 20


def test_several_completions_and_replays_go_on_alike(tiny_llama: str) -> None:
    prompt = {"prompt_token_ids": prompts()[1]}
    params = SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=20)
    single = SamplingParams(temperature=0.9, seed=4, max_tokens=20)
    found = []
    for drafter in (None, Watched(tiny_llama)):
        with open_llm(tiny_llama, drafter=drafter) as llm:
            if drafter is not None:
                draft_in_every_step(llm)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            whole = generate(llm, prompts()[1], temperature=0.9, seed=4, max_tokens=20)
            replays = []
            for cut in (1, 7, 19):
                request = prepare_replay(llm, prompts()[1], single, whole[:cut])
                replays.append(llm._run([request], use_tqdm=False)[0].outputs[0].token_ids)
            assert replays == [whole] * 3
            found.append(([list(answer.token_ids) for answer in output.outputs], whole))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 3


@pytest.mark.parametrize("variant", ["mistral", "gemma3", "deepseek_v3", "gpt_oss"])
def test_targets_and_drafts_with_windows_and_latent_attention(
    tiny_llama: str, tmp_path: Path, variant: str
) -> None:
    """As target, whose block table the draft layers use if one of its groups keeps all tokens."""
    target = make_checkpoint(tmp_path, variant)
    with open_llm(target) as llm:
        want = [generate(llm, prompt, temperature=0, max_tokens=16) for prompt in prompts()]
    for draft in (target, Path(tiny_llama)):
        drafter = Watched(draft)
        with open_drafting(target, drafter) as llm:
            got = [generate(llm, prompt, temperature=0, max_tokens=16) for prompt in prompts()]
        assert got == want
        num_drafts, num_right = drafter.judge([p + w for p, w in zip(prompts(), want, strict=True)])
        if draft == target:  # torch computes some of these: last bits depend on the batch
            assert num_right > 0.9 * num_drafts
            assert num_drafts > 20


def test_draft_layers_take_their_share_of_the_cache(tiny_llama: str) -> None:
    blocks = []
    for settings in (None, {"method": "draft_model", "model": tiny_llama}):
        with open_llm(tiny_llama, speculative_config=settings) as llm:
            blocks.append(llm.engine.scheduler.kv.pool.num_usable)
    assert blocks[1] + 1 == (blocks[0] + 1) // 2  # with the null block


def methods_of(model: nn.Module) -> list[tuple[str, bool]]:
    """How a model's matrices are stored."""
    layers = [module for module in model.modules() if isinstance(module, MatrixLayer)]
    return [(type(each.method).__name__, getattr(each.method, "int8", False)) for each in layers]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_draft_model_is_quantized_if_asked(
    tiny_llama: str, expected: Results, quantization: str
) -> None:
    settings = {"method": "draft_model", "model": tiny_llama, "adaptive": False}
    with open_llm(tiny_llama, quantization=quantization) as llm:
        assert isinstance(llm.engine.executor, InProcessExecutor)
        quantized = methods_of(llm.engine.executor.worker.model)
    settings["quantization"] = quantization
    with open_llm(tiny_llama, speculative_config=settings) as llm:
        assert run(llm) == expected
        assert isinstance(llm.engine.executor, InProcessExecutor)
        worker = llm.engine.executor.worker
        assert isinstance(worker.drafter, DraftModelDrafter)
        assert methods_of(worker.drafter.model) == quantized != methods_of(worker.model)
        stats = llm.engine.speculation_stats()
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens


def test_two_ranks_draft_alike(tiny_llama: str, expected: Results) -> None:
    settings = {"method": "draft_model", "model": tiny_llama, "num_speculative_tokens": 3}
    with open_llm(tiny_llama, speculative_config=settings, tensor_parallel_size=2) as llm:
        assert [tokens for tokens, _ in run(llm)] == [tokens for tokens, _ in expected]


def test_another_vocabulary_is_refused(tiny_llama: str, tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path, "llama", vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocabulary of 300 tokens.* 256.*same family"):
        open_llm(tiny_llama, speculative_config={"method": "draft_model", "model": str(draft)})


def test_a_draft_model_that_is_not_there_is_told_from_the_target(tiny_llama: str) -> None:
    with pytest.raises(ModelError, match=r"speculative_config: no model at '/nowhere'"):
        open_llm(tiny_llama, speculative_config={"method": "draft_model", "model": "/nowhere"})


RECURRENT = ["mamba2", "falcon_h1", "qwen3_next"]


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Results]:
    """A model with recurrent layers, and what it generates."""
    model = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    with open_llm(model) as llm:
        return model, run(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 12},
        {"max_model_len": 128, "num_gpu_blocks_override": 30},
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.slow),
    ],
    ids=["two in flight", "chunks", "few blocks", "one slot"],
)
def test_a_recurrent_model_that_drafts_for_itself_is_right(
    recurrent: tuple[Path, Results], options: dict[str, Any]
) -> None:
    """Its states are those after the tokens that held, whatever was drafted behind them."""
    model, want = recurrent
    drafter = Watched(model)
    with open_drafting(model, drafter, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [tokens for tokens, _ in run(llm)] == [tokens for tokens, _ in want]
        stats = llm.engine.stats()
        assert stats.num_prefix_hits > 0 or "num_gpu_blocks_override" in options
        if "num_gpu_blocks_override" in options and "falcon_h1" in str(model):
            assert stats.num_preemptions > 0
    num_drafts, num_right = drafter.judge(texts(want))
    assert num_right > 0.97 * num_drafts > 100, "near ties may fall the other way"


def test_a_recurrent_model_drafts_for_one_without_recurrent_layers(
    tiny_llama: str, expected: Results, recurrent: tuple[Path, Results]
) -> None:
    drafter = Watched(recurrent[0])
    with open_drafting(tiny_llama, drafter, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        assert run(llm) == expected
    assert len(drafter.proposals) > 50


def test_drafts_end_where_the_draft_models_context_does(
    tiny_llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make_checkpoint(tmp_path, "llama", max_position_embeddings=32)
    prompt, options = prompts()[1], {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with open_llm(tiny_llama) as llm:
        want = generate(llm, prompt, **options)
    drafter = Watched(draft)
    with open_drafting(tiny_llama, drafter, log_level="warning") as llm:
        assert generate(llm, prompt, **options) == want
    ends = [len(known) + len(drafts) for known, drafts in drafter.proposals if drafts]
    assert 30 <= max(ends) <= 33
    assert len(drafter.proposals) > 40, "the rest had no drafts, one token a step"


def test_another_tokenizer_is_refused(tiny_llama: str, tmp_path: Path) -> None:
    words = [f"word{index}" for index in range(256)]
    folders = []
    for name, own in (("target", words), ("same", words), ("other", words[::-1])):
        folder = tmp_path / name
        shutil.copytree(tiny_llama, folder)
        vocabulary = {word: index for index, word in enumerate(own)}
        Tokenizer(models.WordLevel(vocabulary, unk_token=own[0])).save(
            str(folder / "tokenizer.json")
        )
        folders.append(str(folder))
    target, same, other = folders
    options = {"skip_tokenizer_init": False}
    settings = {"method": "draft_model", "model": same}
    open_llm(target, speculative_config=settings, **options).close()
    with pytest.raises(ConfigError, match=r"other.* has another tokenizer.*token 0 is b'word255'"):
        open_llm(target, speculative_config={**settings, "model": other}, **options)


def test_the_default_model_drafts_for_itself_on_the_native_path(default_model: str) -> None:
    """Quantized blocks, a float16 cache, and bits that do not depend on the batch."""
    texts = ["The capital of France is", "1 2 3 4 5 6 7", "def fibonacci(n):"]
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "256MiB"}
    for kind in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, **kind)
        with LLM(default_model, **options) as llm:
            want = tokens_and_logprobs(llm, texts, params)
            known = [llm.get_tokenizer().encode(text) for text in texts]
        drafter = Watched(default_model, num_drafts=4)
        with draft_in_every_step(LLM(default_model, drafter=drafter, **options)) as llm:
            assert tokens_and_logprobs(llm, texts, params) == want
        whole = [prompt + tokens for prompt, (tokens, _) in zip(known, want, strict=True)]
        num_drafts, num_right = drafter.judge(whole)
        assert num_right == num_drafts > 40
