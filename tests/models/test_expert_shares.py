"""A rank's share of the experts: what it loads, and what all shares compute together."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from gguf_twin_files import write_twin
from gguf_twins import TWINS
from tiny_models import make_checkpoint

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.expert_placement import rebalanced, spread_experts
from penstock.layers.expert_share import names_elsewhere
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.ops.experts import Routing
from penstock.ops.registry import Ops
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import ConfigError
from penstock.runner.expert_balance import move_experts

# Whole quantization blocks, and experts that two ranks do not divide.
SIZES = {"moe_intermediate_size": 64, "hidden_size": 64, "num_experts": 5}


def place(rank: int, size: int) -> Mesh:
    """A rank's place among `size` that hold experts. They cannot sum: nothing connects them."""
    group = RankGroup(rank, size)
    return Mesh(tp=group, ep=group)


def load(checkpoint: Path, mesh: Mesh, **options: Any) -> list[Experts]:
    """The layers with experts of a checkpoint, as this rank holds them."""
    config = EngineConfig.from_options({"model": str(checkpoint), "cpu_threads": 1, **options})
    source = resolve_source(config.model, config.load)
    model, _, _ = load_model(config, source, detect_platform(config.device), mesh, 64)
    return [module for module in model.modules() if isinstance(module, Experts)]


def make_variant(folder: Path, variant: str) -> Path:
    if variant != "gguf":
        return make_checkpoint(folder, variant, **SIZES)
    checkpoint = make_checkpoint(folder, "qwen2_moe", **SIZES)
    return write_twin(folder / "twin.gguf", checkpoint, TWINS["qwen2moe"], quantize="Q8_0")


def test_experts_are_spread_evenly_in_order() -> None:
    assert spread_experts(8, 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert spread_experts(7, 3) == [(0, 1, 2), (3, 4), (5, 6)]
    with pytest.raises(ConfigError, match="3 are fewer than 4 ranks: use fewer"):
        spread_experts(3, 4)


KINDS = pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"cpu_backend": "torch"}),
        ("gpt_oss", {"cpu_backend": "torch"}),  # with biases
        ("qwen3_moe", {"quantization": "int8"}),
        ("gguf", {}),
        ("gguf", {"cpu_backend": "torch"}),
    ],
)


@KINDS
def test_the_shares_of_all_ranks_add_up(
    tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    """Where ranks do not divide the experts, and for tokens whose experts are all elsewhere."""
    checkpoint = make_variant(tmp_path, variant)
    whole = load(checkpoint, Mesh(), **options)[0]
    count = whole.config.num_experts
    shares = [load(checkpoint, place(rank, 2), **options)[0] for rank in range(2)]
    assert sum(len(share.config.own_experts) for share in shares) == count
    x = torch.randn(9, whole.config.hidden_size)
    weights, ids = whole.build.ops.route(whole.gate(x), whole.routing, None)
    ids[0] = 0  # on the first rank alone
    parts = []
    for share in shares:
        assert share.placed is not None
        parts.append(share.experts(x, *share.placed.held_here(weights, ids)))
    assert torch.equal(parts[1][0], torch.zeros_like(x[0]))
    torch.testing.assert_close(sum(parts), whole.experts(x, weights, ids), atol=1e-5, rtol=1e-5)


class ThreadGroup(RankGroup):
    """Ranks in threads, which exchange rows."""

    mail: dict[tuple[int, int], Queue[torch.Tensor]] = {}  # each test's own, by sender and receiver

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._swap([x] * self.size))

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(self._swap(parts)).sum(0)

    def _swap(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        for rank, part in enumerate(parts):
            self.mail[self.rank, rank].put(part.clone())
        return [self.mail[rank, self.rank].get(timeout=60) for rank in range(self.size)]

    def exchange(self, x: torch.Tensor, going: list[int], coming: list[int]) -> torch.Tensor:
        parts = self._swap([*x.split(going)])
        assert [len(part) for part in parts] == coming
        return torch.cat(parts)


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between up to four ranks."""
    pairs = itertools.product(range(4), repeat=2)
    monkeypatch.setattr(ThreadGroup, "mail", {pair: Queue() for pair in pairs})


@pytest.mark.usefixtures("mail")
@pytest.mark.parametrize("scale_inputs", [False, True])
@pytest.mark.parametrize("gathers_tokens", [False, True])
def test_tokens_of_three_ranks_reach_their_experts(
    gathers_tokens: bool, scale_inputs: bool
) -> None:
    """One has no tokens, and takes part."""
    config = ExpertsConfig(5, 8, 16, Routing(3), scale_inputs=scale_inputs)
    build = Build(torch.float32, torch.device("cpu"), 64, Ops("cpu"), gathers_tokens=gathers_tokens)
    torch.manual_seed(2)
    whole = Experts(build, config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    texts = [torch.randn(4, 8), torch.randn(0, 8), torch.randn(7, 8)]

    def compute(rank: int) -> torch.Tensor:
        own = Experts(replace(build, mesh=Mesh(ep=ThreadGroup(rank, 3))), config)
        own.gate.load_state_dict(whole.gate.state_dict())
        for place, expert in enumerate(own.config.own_experts):
            theirs = whole.experts.tensors_of(expert)
            for mine, tensor in zip(own.experts.tensors_of(place), theirs, strict=True):
                mine.copy_(tensor)
        if len(texts[rank]):
            return own(texts[rank])
        own.join()
        return texts[rank]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compute, range(3)))
    for rows, text in zip(found, texts, strict=True):
        torch.testing.assert_close(rows, whole(text), atol=1e-4, rtol=1e-5)


@pytest.mark.usefixtures("mail")
@KINDS
def test_experts_with_copies_add_up_before_and_after_they_move(
    tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    """Every copy of an expert computes some of its tokens."""
    checkpoint, ranks = make_variant(tmp_path, variant), 4
    whole = load(checkpoint, Mesh(), **options)[0]
    eplb = {"enable_expert_parallel": True, "data_parallel_size": ranks, "enable_eplb": True,
            "eplb_config": {"num_redundant_experts": 4}}  # fmt: skip
    shares = [
        load(checkpoint, Mesh(ep=RankGroup(rank, ranks)), **options, **eplb)[0]
        for rank in range(ranks)
    ]
    count = whole.config.num_experts
    x = torch.randn(40, whole.config.hidden_size)
    weights, ids = whole.build.ops.route(whole.gate(x), whole.routing, None)
    expected = whole.experts(x, weights, ids)
    before = spread_experts(count, ranks, num_redundant=4)
    after = rebalanced([0, 1, 2, 3, 90, *range(count - 5)], before)
    assert after != before
    for placement in (before, after, before):
        with ThreadPoolExecutor(ranks) as pool:
            moving = [
                pool.submit(move_experts, share, placement, ThreadGroup(rank, ranks))
                for rank, share in enumerate(shares)
            ]
            assert len({each.result() for each in moving}) == 1
        parts = []
        for share in shares:
            assert share.placed is not None
            with torch.inference_mode():
                share.placed.place(placement)
            parts.append(share.placed.held_here(weights, ids))
        computed = torch.stack(
            [own < len(held) for (_, own), held in zip(parts, placement, strict=True)]
        )
        assert (computed.sum(0) == 1).all(), "one copy computes each pair of token and expert"
        for rank, held in enumerate(placement):
            for expert in held:
                assert (computed[rank] & (ids == expert)).any() or not (ids == expert).sum() > 8
        outputs = [share.experts(x, *part) for share, part in zip(shares, parts, strict=True)]
        torch.testing.assert_close(sum(outputs), expected, atol=1e-5, rtol=1e-5)


def test_experts_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "mixtral")  # 4 experts
    config = EngineConfig.from_options({"model": str(checkpoint)})
    source = resolve_source(config.model, config.load)
    build = Build(torch.float32, torch.device("meta"), 64, Ops("cpu"), mesh=place(1, 2))
    experts = ExpertsConfig(4, 8, 8, Routing(2))
    patterns = names_elsewhere(torch.nn.ModuleList([Experts(build, experts)]))
    tensors = open_checkpoint(source, config.load)

    def is_wanted(name: str) -> bool:
        return not any(re.search(pattern, name) for pattern in patterns)

    read = {name for name, _ in tensors.tensors(is_wanted)}
    skipped = set(tensors.names()) - read
    assert {name.partition(".experts.")[2][0] for name in skipped} == {"0", "1"}
    assert {name.partition(".experts.")[2][:1] for name in read} == {"", "2", "3"}
    alone = Experts(replace(build, mesh=Mesh()), experts)
    assert names_elsewhere(torch.nn.ModuleList([alone])) == ()
