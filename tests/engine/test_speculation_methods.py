"""Every method of speculation with every feature: what comes is what comes without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import make_eagle, make_head
from lora.adapters import make_adapter
from medusa_heads import make_heads
from mtp_targets import make_target
from sampling_kinds import KINDS
from structured.byte_model import VOCAB_SIZE, make_byte_tokenizer, open_llm
from tiny_engine import greedy_tokens, random_prompts
from tiny_models import make_checkpoint

from penstock import LLM, LoRARequest, SamplingParams
from penstock import StructuredOutputsParams as Structured

PROMPTS = random_prompts("methods", 1, 9, 40)
ADAPTED = {  # the layers that adapters change, by target
    "llama": "all-linear",
    "glm4_moe": ["q_proj", "o_proj", "down_proj"],
    "qwen3_next": ["q_proj", "out_proj", "o_proj"],
}


@dataclass(frozen=True)
class Method:
    """A target and how drafts for it are made. `make` returns keys of `speculative_config`."""

    target: str  # variant
    make: Callable[[Path, Path], dict[str, Any]] = lambda target, folder: {}


def _eagle(target: Path, folder: Path) -> dict[str, Any]:
    return {"model": str(make_eagle(folder, target, extras=True))}


def _eagle3(target: Path, folder: Path) -> dict[str, Any]:
    return {"model": str(make_head(folder, target, embeds=True)[0])}


def _medusa(target: Path, folder: Path) -> dict[str, Any]:
    return {"model": str(make_heads(folder, target))}


METHODS: dict[str, Method] = {
    "ngram": Method("llama", lambda target, folder: {"prompt_lookup_min": 1}),
    "suffix": Method("llama", lambda *_: {"suffix_decoding_min_token_prob": 0.01}),
    "custom": Method("llama", lambda *_: {"model": "drafters:AtRandom"}),
    "draft_model": Method("llama", lambda target, folder: {"model": str(target)}),
    "eagle": Method("llama", _eagle),
    "eagle3": Method("llama", _eagle3),
    "medusa": Method("llama", _medusa),
    "mtp": Method("glm4_moe"),
    "mtp of a hybrid model": Method("qwen3_next"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("methods")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, Path]:
    made = {"llama": make_checkpoint(folder / "llama", "llama", vocab_size=VOCAB_SIZE)}
    for variant in ("glm4_moe", "qwen3_next"):
        made[variant] = make_target(folder / variant, variant, vocab_size=VOCAB_SIZE)
    for path in made.values():
        make_byte_tokenizer().save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    for variant, path in made.items():
        make_adapter(path / "adapter", path, r=4, target_modules=ADAPTED[variant])
    return made


def open_target(target: Path, **options: Any) -> LLM:
    return open_llm(str(target), enable_lora=True, **options)


@pytest.fixture(scope="module")
def expected(targets: dict[str, Path]) -> dict[str, Any]:
    found = {}
    for name, path in targets.items():
        with open_target(path, enable_prefix_caching=False) as llm:
            found[name] = run(llm, path)
        count = len(KINDS) * len(PROMPTS)  # the first ones, and with the adapter the last ones
        tokens = [answers[0][0] for answers in found[name]]
        assert tokens[:count] != tokens[-count:]
    return found


def some_params() -> list[SamplingParams]:
    """Each feature with greedy sampling, and with noise."""
    features: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"n": 2},
        {"speculative": False},
        {"stop": ["a", "é", "0"], "include_stop_str_in_output": True},
        {"structured_outputs": Structured(regex="(ab|x[0-9]{3}){4}!")},
        {"structured_outputs": Structured(choice=["first", "second"]), "n": 2},
    ]
    kinds = [SamplingParams(max_tokens=20, **kind) for kind in KINDS.values()]
    noises: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}]
    return kinds + [
        SamplingParams(max_tokens=20, **feature, **noise)
        for feature in features
        for noise in noises
    ]


def run(llm: LLM, target: Path) -> list[Any]:
    """All that clients see of every kind of request, all at once, some with an adapter."""
    kinds = some_params()
    adapted = [SamplingParams(max_tokens=20, logprobs=2, **kind) for kind in KINDS.values()]
    params = [own for own in kinds + adapted for _ in PROMPTS]
    adapter = LoRARequest("adapter", 1, str(target / "adapter"))
    adapters = [own for own in [None] * len(kinds) + [adapter] * len(adapted) for _ in PROMPTS]
    prompts = PROMPTS * (len(kinds) + len(adapted))
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    for output, own in zip(outputs, params, strict=True):
        assert own.speculative or all(answer.drafts is None for answer in output.outputs)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [
        [
            (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason,
             values(answer.logprobs), values(output.prompt_logprobs))
            for answer in output.outputs
        ]
        for output in outputs
    ]  # fmt: skip


def values(logprobs: Any) -> list[dict[int, Any]]:
    return [
        {token: pytest.approx(entry.logprob, abs=1e-3) for token, entry in (row or {}).items()}
        for row in logprobs or []
    ]


@pytest.mark.parametrize("method", METHODS)
def test_what_comes_is_what_comes_without(
    method: str, targets: dict[str, Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    own = METHODS[method]
    target = targets[own.target]
    name = method.partition(" ")[0]
    config = {"method": name, "num_speculative_tokens": 3, "adaptive": False}
    config |= own.make(target, tmp_path / "head")
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 12, "speculative_config": config}
    with open_target(target, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert run(llm, target) == expected[own.target]
        assert llm.engine.speculation_stats().num_draft_tokens > 200
        if method == "draft_model":
            assert_greedy_drafts_hold(llm)


OF_ONE_RANK = ("eagle3", "draft_model", "eagle", "medusa")
LONG = [  # `test_rank_mix` and others have drafts of the host and of draft models on ranks
    *((method, None) for method in ("ngram", "draft_model", "eagle", "medusa", "mtp")),
    *((method, 1) for method in OF_ONE_RANK),
]


@pytest.mark.parametrize(
    ("method", "size"),
    [("eagle3", None), *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)],
)
def test_two_ranks_give_what_one_gives(
    method: str,
    size: int | None,
    targets: dict[str, Path],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    own = METHODS[method]
    target = targets[own.target]
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    config |= own.make(target, tmp_path / "head")
    if size is not None:
        config["draft_tensor_parallel_size"] = size
    with open_target(target, speculative_config=config, tensor_parallel_size=2) as llm:
        assert run(llm, target) == expected[own.target]
        assert llm.engine.speculation_stats().num_draft_tokens > 100
        if method == "draft_model":
            assert_greedy_drafts_hold(llm)


def assert_greedy_drafts_hold(llm: LLM) -> None:
    """A model that drafts for itself is right."""
    before = llm.engine.speculation_stats()
    greedy_tokens(llm, PROMPTS, 1 + 4 * 8)
    after = llm.engine.speculation_stats()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    assert num_drafts == 3 * 8 * len(PROMPTS)
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafts
