"""Linear layers: which parts are fused into them, and which rows or columns a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.layers.loadable import Expected, Shape
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import Shard
from penstock.ops.blocks import BlockTensor, Weight, take_rows

if TYPE_CHECKING:
    from penstock.layers.build import Build


Product = Callable[[torch.Tensor], torch.Tensor]


class LinearAdapter(Protocol):
    """Adds to a layer's output. It reads what it needs of the step from the forward context."""

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """The layer's output, where `product(x)` is the output without the adapter."""


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a fused layer.

    `num_shards` is the number of distinct shards of its rows. It is smaller than the number of
    ranks if key and value heads are replicated.
    """

    name: str
    out_features: int
    num_shards: int


class Linear(MatrixLayer):
    """y = x W^T + b, where W is a stack of parts.

    It is sharded by output rows (`Part.num_shards` > 1), by input columns (`split_input`, followed
    by a sum over ranks), or not at all.
    """

    def __init__(
        self,
        build: Build,
        in_features: int,
        parts: Sequence[Part],
        bias: bool = False,
        split_input: bool = False,
    ) -> None:
        super().__init__(
            build,
            _divide(in_features, build.tp.size if split_input else 1),
            {part.name: _divide(part.out_features, part.num_shards) for part in parts},
        )
        self.split_input = split_input
        self.full_in_features = in_features
        self.parts = {part.name: part for part in parts}
        self.adapter: LinearAdapter | None = None
        self.takes_adapters = True  # False: the matrix is also used other than by `forward`
        self.is_label_head = False  # True: it follows pooling
        self.encodes_media = False  # True: its rows are those of media, not of the step
        self.bias = build.empty(self.out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._product(x) if self.adapter is None else self.adapter(x, self._product)
        return self.build.tp.all_reduce(output) if self.split_input else output

    def last_parts(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        """Like `forward`, with the outputs of the last parts only."""
        count = sum(self.part_rows[name] for name in names)
        output = None
        if self.adapter is None and not self.split_input:
            bias = None if self.bias is None else self.bias[-count:]
            output = self.method.apply_last(self, names, x, bias)
        return self(x)[:, -count:] if output is None else output

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.own_bias)

    @property
    def own_bias(self) -> torch.Tensor | None:
        # With split input, it must enter the sum over ranks only once.
        return self.bias if not self.split_input or self.build.tp.rank == 0 else None

    def shard_of(self, part: str) -> tuple[slice, slice]:
        rank, rows = self.build.tp.rank, self.part_rows[part]
        first_row = rank * self.parts[part].num_shards // self.build.tp.size * rows
        first_column = rank * self.in_features if self.split_input else 0
        return (
            slice(first_row, first_row + rows),
            slice(first_column, first_column + self.in_features),
        )

    def expected(self) -> Mapping[tuple[str, str], Shape | Expected]:
        shapes: dict[tuple[str, str], Shape | Expected] = {}
        for part in self.parts.values():
            shape = (part.out_features, self.full_in_features)
            for parameter, expected in self.method.expected(part.name, shape).items():
                shapes[parameter, part.name] = expected
            if self.bias is not None:
                shapes["bias", part.name] = (part.out_features,)
        return shapes

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        rows, columns = self.shard_of(part)
        if parameter == "bias":
            own = take_rows(tensor, rows.start, rows.stop)
            assert self.bias is not None
            assert not isinstance(own, BlockTensor)
            self.rows_of(self.bias, part).copy_(own)
            return
        shape = (self.parts[part].out_features, self.full_in_features)
        shard = Shard(shape, rows.start, self.part_rows[part], columns.start, self.in_features)
        self.method.load(self, part, parameter, tensor, shard)


def column_linear(
    build: Build, in_features: int, outputs: dict[str, int], bias: bool = False
) -> Linear:
    """Fused parts, each sharded over all ranks by output rows."""
    parts = [Part(name, rows, build.tp.size) for name, rows in outputs.items()]
    return Linear(build, in_features, parts, bias)


def row_linear(build: Build, in_features: int, out_features: int, bias: bool = False) -> Linear:
    """Sharded over all ranks by input columns. Every rank gets the full output."""
    return Linear(build, in_features, [Part("", out_features, 1)], bias, split_input=True)


def qkv_linear(
    build: Build,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: bool = False,
) -> Linear:
    """Query, key and value projections. Key heads are replicated if there are more ranks."""
    kv_shards = min(build.tp.size, num_kv_heads)
    parts = [
        Part("q_proj", num_heads * head_dim, build.tp.size),
        Part("k_proj", num_kv_heads * head_dim, kv_shards),
        Part("v_proj", num_kv_heads * head_dim, kv_shards),
    ]
    return Linear(build, hidden_size, parts, bias)


def _divide(total: int, ranks: int) -> int:
    assert total % ranks == 0, f"{total} does not split over {ranks} ranks"
    return total // ranks
