"""A rank's share of the experts: what it loads, and what all shares compute together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_twin_files import write_twin
from gguf_twins import TWINS
from tiny_models import make_checkpoint

from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.build import Build
from penstock.layers.expert_share import names_elsewhere, spread_experts
from penstock.layers.experts import Experts, ExpertsConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.ops.experts import Routing
from penstock.ops.registry import Ops
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import ConfigError

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


def test_experts_are_spread_evenly_in_order() -> None:
    assert spread_experts(8, 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert spread_experts(7, 3) == [(0, 1, 2), (3, 4), (5, 6)]
    with pytest.raises(ConfigError, match="3 are fewer than 4 ranks: use fewer"):
        spread_experts(3, 4)


@pytest.mark.parametrize(
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
def test_the_shares_of_all_ranks_add_up(
    tmp_path: Path, variant: str, options: dict[str, Any]
) -> None:
    """Where ranks do not divide the experts, and for tokens whose experts are all elsewhere."""
    checkpoint = make_checkpoint(tmp_path, "qwen2_moe" if variant == "gguf" else variant, **SIZES)
    if variant == "gguf":
        checkpoint = write_twin(
            tmp_path / "twin.gguf", checkpoint, TWINS["qwen2moe"], quantize="Q8_0"
        )
    whole = load(checkpoint, Mesh(), **options)[0]
    count = whole.config.num_experts
    shares = [load(checkpoint, place(rank, 2), **options)[0] for rank in range(2)]
    assert sum(len(share.config.own_experts) for share in shares) == count
    x = torch.randn(9, whole.config.hidden_size)
    weights, ids = whole.build.ops.route(whole.gate(x), whole.routing, None)
    ids[0] = 0  # on the first rank alone
    parts = []
    for share in shares:
        assert share.share is not None
        parts.append(share.experts(x, *share.share(weights, ids)))
    assert torch.equal(parts[1][0], torch.zeros_like(x[0]))
    torch.testing.assert_close(sum(parts), whole.experts(x, weights, ids), atol=1e-5, rtol=1e-5)


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
