"""An EAGLE-3 head drafts what a plain computation of it says, and never changes the output."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import open_llm, tokens_and_logprobs
from torch.nn import functional

from penstock import LLM, SamplingParams
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafter import Drafts, DraftStep
from penstock.runner.drafters.eagle3 import Eagle3Drafter

Tensors = Mapping[str, torch.Tensor]
DRAFT_VOCAB = 96
AUX = [0, 1]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "logprobs": 2},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2},
}


def make_head(
    folder: Path, target: Path, speculators: bool = False, **changes: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random head for the target; its tensors under the names of the EAGLE authors."""
    settings = json.loads((target / "config.json").read_text())
    size, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv = settings.get("num_key_value_heads", heads)
    head_dim = settings.get("head_dim") or size // heads
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    inner = settings["intermediate_size"]
    chosen = torch.randperm(settings["vocab_size"], generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": rand(size, len(AUX) * size),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": 2 * rand(heads * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": 2 * rand(kv * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": rand(kv * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": rand(size, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": rand(inner, size),
        "midlayer.mlp.up_proj.weight": rand(inner, size),
        "midlayer.mlp.down_proj.weight": rand(size, inner),
        "norm.weight": norm(),
        "lm_head.weight": 4 * rand(DRAFT_VOCAB, size),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(settings["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True),
    }
    layer = {**settings, "num_hidden_layers": 1, "max_position_embeddings": 16}
    own = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": AUX, **changes}
    stored = dict(tensors)
    if speculators:
        own |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        own["transformer_layer_config"] = layer
        stored = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    else:
        own = {**layer, "architectures": ["LlamaForCausalLMEagle3"], **own}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own))
    save_file(stored, folder / "model.safetensors")
    return folder, tensors


# -- the same computation, plainly


class Plain:
    """The head over a whole text at once, in torch. The target is transformers'."""

    def __init__(self, target: Path, head: Tensors) -> None:
        from transformers import AutoModelForCausalLM

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config, self.head = self.target.config, head

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """What the head proposes behind these tokens, greedily."""
        ids = torch.tensor([token_ids])
        states = self.target(ids, output_hidden_states=True).hidden_states
        combined = torch.cat([states[index][0] for index in AUX], -1) @ self.head["fc.weight"].T
        before = torch.cat([torch.zeros_like(combined[:1]), combined[:-1]])
        embed = self.target.get_input_embeddings()
        rows = embed(ids)[0]
        drafts: list[int] = []
        for _ in range(count):
            states, last = self._layer(rows, before)
            best = int((states @ self.head["lm_head.weight"].T).argmax())
            drafts.append(best + int(self.head["d2t"][best]))
            rows = torch.cat([rows, embed(torch.tensor(drafts[-1:]))])
            before = torch.cat([before, last[None]])
        return drafts

    def _layer(self, rows: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last row's normed state, and the hidden state behind it."""
        head, heads = self.head, self.config.num_attention_heads
        size = self.config.hidden_size // heads
        normed = self._norm(before, "midlayer.hidden_norm")
        x = torch.cat([self._norm(rows, "midlayer.input_layernorm"), normed], -1)

        def heads_of(name: str) -> torch.Tensor:
            out = x @ head[f"midlayer.self_attn.{name}_proj.weight"].T
            return out.unflatten(-1, (-1, size)).transpose(0, 1)

        query, key = self._rotate(heads_of("q")), self._rotate(heads_of("k"))
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], heads_of("v")[None], is_causal=True, enable_gqa=True
        )[0]
        out = attended.transpose(0, 1).flatten(1) @ head["midlayer.self_attn.o_proj.weight"].T
        residual = before + out
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up, down = (head[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        residual = residual + (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return self._norm(residual[-1:], "norm")[0], residual[-1]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        return functional.rms_norm(x, x.shape[-1:], self.head[f"{name}.weight"], eps)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.outer(
            torch.arange(x.shape[1]).float(), theta ** -(torch.arange(half).float() / half)
        )
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Watched(Eagle3Drafter):
    def __init__(self, head: Path, num_drafts: int = 3) -> None:
        super().__init__(str(head), num_drafts)
        self.proposals: list[tuple[list[int], list[int]]] = []

    def propose(self, step: DraftStep) -> Drafts:
        drafts = super().propose(step)
        for slot, own in zip(step.slots, drafts.token_ids.tolist(), strict=True):
            known = step.tables.token_ids[slot, : int(step.tables.num_tokens[slot])]
            self.proposals.append((known.tolist(), own))
        return drafts


@pytest.fixture(scope="module")
def head(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    return make_head(tmp_path_factory.mktemp("eagle") / "head", Path(tiny_llama))


def prompts(lengths: tuple[int, ...] = (1, 9, 40, 90)) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in lengths]


def run(llm: LLM) -> list[Any]:
    kinds = [SamplingParams(max_tokens=24, **kind) for kind in KINDS.values()]
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
        ({"architectures": ["LlamaForCausalLM"]}, ModelError, "not an EAGLE-3 head"),
    ],
    ids=["vocabulary", "layers", "not a head"],
)
def test_a_head_for_another_target_is_refused(
    tiny_llama: str, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    folder, _ = make_head(tmp_path / "head", Path(tiny_llama), **changes)
    with pytest.raises(error, match=text):
        open_llm(tiny_llama, speculative_config={"method": "eagle3", "model": str(folder)})


def test_token_ids_outside_the_vocabulary_are_refused(
    tiny_llama: str, head: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder, _ = make_head(tmp_path / "head", Path(tiny_llama))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][-1] = 500
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="outside the vocabulary"):
        open_llm(tiny_llama, speculative_config={"method": "eagle3", "model": str(folder)})
