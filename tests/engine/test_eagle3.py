"""An EAGLE-3 head drafts what a plain computation of it says, and never changes the output."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import Plain, Tensors, Watched, make_head
from safetensors.torch import load_file, save_file
from sampling_kinds import KINDS
from tiny_engine import open_llm, tokens_and_logprobs

from penstock import LLM, SamplingParams
from penstock.models.eagle3 import Eagle3
from penstock.protocol.errors import ConfigError, ModelError
from penstock.scheduler.plan import PlannedStep


@pytest.fixture(scope="module")
def head(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    return make_head(tmp_path_factory.mktemp("eagle") / "head", Path(tiny_llama))


def prompts(lengths: tuple[int, ...] = (1, 9, 40, 90)) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in lengths]


def run(llm: LLM) -> list[Any]:
    kinds = [SamplingParams(max_tokens=24, logprobs=2, **kind) for kind in KINDS.values()]
    return [tokens_and_logprobs(llm, prompts(), params) for params in kinds]


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> list[Any]:
    with open_llm(tiny_llama, enable_prefix_caching=False) as llm:
        return run(llm)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4},
        {"async_scheduling": True},
    ],
    ids=["plain", "chunks", "two in flight"],
)
def test_drafts_are_those_of_a_plain_computation(
    tiny_llama: str, head: tuple[Path, Tensors], options: dict[str, Any]
) -> None:
    folder, tensors = head
    plain, drafter = Plain(Path(tiny_llama), tensors), Watched(folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"enable_prefix_caching": False, "dtype": "float32", **options}
    with open_llm(tiny_llama, drafter=drafter, **options) as llm:
        llm.generate(prompts(), greedy, use_tqdm=False)
    assert len(drafter.proposals) > 30
    for known, drafts in drafter.proposals:
        if len(known) < 100:
            assert drafts == plain.drafts(known, 3), known


@pytest.mark.parametrize("layers", [[2, 0], [1, 1]])
def test_the_targets_layers_are_read_in_the_heads_order(
    tiny_llama: str, tmp_path: Path, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "AUX", layers)
    folder, tensors = make_head(tmp_path / "head", Path(tiny_llama))
    plain, drafter = Plain(Path(tiny_llama), tensors), Watched(folder)
    with open_llm(tiny_llama, drafter=drafter, enable_prefix_caching=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        llm.generate(prompts((9, 40)), params, use_tqdm=False)
    assert len(drafter.proposals) > 5
    assert all(drafts == plain.drafts(known, 3) for known, drafts in drafter.proposals)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4},
        {"num_gpu_blocks_override": 14, "block_size": 16},
        {"async_scheduling": True},
    ],
    ids=["plain", "chunks", "preemption", "two in flight"],
)
def test_tokens_and_logprobs_are_those_without_a_head(
    tiny_llama: str, head: tuple[Path, Tensors], expected: list[Any], options: dict[str, Any]
) -> None:
    config = {"method": "eagle3", "model": str(head[0]), "adaptive": False}
    with open_llm(tiny_llama, speculative_config=config, **options) as llm:
        assert run(llm) == expected
        assert run(llm) == expected  # from the prefix cache
        assert llm.engine.speculation_stats().num_draft_tokens > 100


@pytest.mark.parametrize(
    "num_tokens", [96, 256, None], ids=["own head", "own head for all tokens", "the target's head"]
)
@pytest.mark.parametrize("embeds", [False, True], ids=["the target's embedding", "own embedding"])
def test_a_heads_own_matrices_take_the_place_of_the_targets(
    tiny_llama: str, tmp_path: Path, embeds: bool, num_tokens: int | None, expected: list[Any]
) -> None:
    folder, tensors = make_head(
        tmp_path / "head", Path(tiny_llama), num_tokens=num_tokens, embeds=embeds
    )
    plain, drafter = Plain(Path(tiny_llama), tensors), Watched(folder)
    options = {"enable_prefix_caching": False, "dtype": "float32"}
    with open_llm(tiny_llama, drafter=drafter, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.generate(prompts((9, 40)), params, use_tqdm=False)
        assert len(drafter.proposals) > 10
        assert all(drafts == plain.drafts(known, 3) for known, drafts in drafter.proposals)
        assert run(llm) == expected


def test_copies_of_the_targets_matrices_are_not_kept(tiny_llama: str, tmp_path: Path) -> None:
    folder, bare = make_head(tmp_path / "head", Path(tiny_llama), num_tokens=None)
    target, proposals = load_file(Path(tiny_llama) / "model.safetensors"), []
    for difference in (None, 0.0, 0.01):  # of one number from the target's
        tensors = dict(bare)
        if difference is not None:
            for name, source in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
                tensors[f"{name}.weight"] = target[f"{source}.weight"].clone()
                tensors[f"{name}.weight"][-1, -1] += difference
        save_file(tensors, folder / "model.safetensors")
        drafter = Watched(folder)
        with open_llm(tiny_llama, drafter=drafter) as llm:
            assert isinstance(drafter.model, Eagle3)
            for own in (drafter.model.embed_tokens, drafter.model.lm_head):
                assert (own is not None) == bool(difference)
            llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
        proposals.append(drafter.proposals)
    assert proposals[0] == proposals[1]


def test_rows_of_prompts_take_keys_and_values_only(
    tiny_llama: str, head: tuple[Path, Tensors]
) -> None:
    """The head's output is needed where drafts begin, once per request."""
    drafter, rows = Watched(head[0]), list[int]()
    with open_llm(tiny_llama, drafter=drafter) as llm:
        for name, module in drafter.model.named_modules():
            if name.endswith(("o_proj", "mlp")):
                module.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
        llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
    assert 0 < max(rows) <= len(prompts())


def test_rows_that_the_head_did_not_see_change_no_tokens(
    tiny_llama: str, head: tuple[Path, Tensors]
) -> None:
    """Blocks with such rows are cached, and the second turn of a chat reads them."""
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40, ignore_eos=True)

    def chat(llm: LLM) -> list[list[int]]:
        turns = [prompts()[1]["prompt_token_ids"]]
        for _ in range(3):
            (output,) = llm.generate({"prompt_token_ids": turns[-1]}, params, use_tqdm=False)
            turns.append([*turns[-1], *output.outputs[0].token_ids])
        return turns

    with open_llm(tiny_llama) as llm:
        expected = chat(llm)
    config = {"method": "eagle3", "model": str(head[0])}
    with open_llm(tiny_llama, speculative_config=config, block_size=4) as llm:
        speculation, rng = llm.engine.scheduler.speculation, random.Random(1)

        def plan(step: PlannedStep, running: object) -> None:
            step.num_drafts, step.without_drafts = rng.choice([0, 0, 2]), False

        speculation.plan = plan  # type: ignore[method-assign]
        speculation.num_to_verify = lambda state: state.num_drafts  # type: ignore[method-assign]
        assert chat(llm) == expected
        assert llm.engine.stats().num_prefix_hits > 80
        assert llm.engine.speculation_stats().num_draft_tokens > 20


def test_heads_of_the_speculators_library_are_the_same(
    tiny_llama: str, head: tuple[Path, Tensors], tmp_path: Path
) -> None:
    theirs, _ = make_head(tmp_path / "theirs", Path(tiny_llama), speculators=True)
    proposals = []
    for folder in (head[0], theirs):
        drafter = Watched(folder)
        with open_llm(tiny_llama, drafter=drafter) as llm:
            llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
        proposals.append(drafter.proposals)
    assert proposals[0] == proposals[1]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"vocab_size": 300}, ConfigError, "vocab_size 300, this one's is 256"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 9]}, ModelError, "0 to 2, got"),
        ({"architectures": ["LlamaForCausalLM"]}, ConfigError, "not an EAGLE-3 head.* use method"),
        ({"architectures": 5}, ConfigError, "not an EAGLE-3 head.* not 5"),
    ],
    ids=["vocabulary", "layers", "not a head", "no architecture"],
)
def test_a_head_for_another_target_is_refused(
    tiny_llama: str, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    folder, _ = make_head(tmp_path / "head", Path(tiny_llama), **changes)
    with pytest.raises(error, match=text):
        open_llm(tiny_llama, speculative_config={"method": "eagle3", "model": str(folder)})


def test_a_shorter_context_than_the_targets_is_extended_with_a_line(
    tiny_llama: str, head: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's config.json says 16 positions."""
    lines: list[str] = []
    logger = logging.getLogger("penstock.runner.drafters.eagle_head")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    config = {"method": "eagle3", "model": str(head[0])}
    with open_llm(tiny_llama, speculative_config=config, max_model_len=128):
        (line,) = lines
    assert line.endswith("max_position_embeddings 16: it drafts up to max_model_len, 128 tokens")


def test_token_ids_outside_the_vocabulary_are_refused(
    tiny_llama: str, head: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder, _ = make_head(tmp_path / "head", Path(tiny_llama))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][-1] = 500
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="outside the vocabulary"):
        open_llm(tiny_llama, speculative_config={"method": "eagle3", "model": str(folder)})
