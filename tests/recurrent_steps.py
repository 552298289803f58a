"""Recurrent layers driven step by step, and what they must give: token by token, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.nn.functional as F

from penstock.ops.attention import AttentionMetadata
from penstock.ops.mamba2 import SpaceWeights
from penstock.ops.recurrent import StateStep, state_step

CHANNELS, WIDTH = 5, 4
MAX_WRONG = 8  # rejected drafts of a request in a step


@dataclass
class Conv:
    """One convolution's weights; a token is its channels."""

    weight: torch.Tensor = field(default_factory=lambda: torch.randn(CHANNELS, WIDTH))
    bias: torch.Tensor = field(default_factory=lambda: torch.randn(CHANNELS))
    state_shape: tuple[int, ...] = (WIDTH - 1, CHANNELS)

    def tokens(self, count: int) -> list[torch.Tensor]:
        return [torch.randn(count, CHANNELS)]

    def run(
        self, ops: ModuleType, inputs: list[torch.Tensor], states: torch.Tensor, step: StateStep
    ) -> torch.Tensor:
        (x,) = inputs
        weight, bias = self.weight.to(x.device), self.bias.to(x.device)
        output: torch.Tensor = ops.causal_conv(x, weight, bias, states, step)
        return output

    def naive(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [tokens, ...], and the state after each token."""
        x = F.pad(inputs[0].double(), (0, 0, WIDTH - 1, 0))
        windows = x.unfold(0, WIDTH, 1)  # [tokens, channels, width]
        output = F.silu((windows * self.weight.double()).sum(-1) + self.bias.double())
        return output, windows[..., 1:].transpose(1, 2)


class Mamba:
    def __init__(
        self, heads: int = 4, groups: int = 2, head_dim: int = 6, state_size: int = 3
    ) -> None:
        self.heads, self.groups, self.head_dim = heads, groups, head_dim
        self.state_size = state_size
        self.a, self.d = -torch.rand(heads) * 3, torch.randn(heads)
        self.dt_bias = torch.randn(heads) - 2.0
        self.state_shape = (heads, head_dim, state_size)

    def tokens(self, count: int) -> list[torch.Tensor]:
        of_group = (count, self.groups, self.state_size)
        return [
            torch.randn(count, self.heads, self.head_dim),
            torch.randn(count, self.heads),
            torch.randn(of_group),
            torch.randn(of_group),
        ]

    def run(
        self, ops: ModuleType, inputs: list[torch.Tensor], states: torch.Tensor, step: StateStep
    ) -> torch.Tensor:
        a, d, bias = (x.to(states.device) for x in (self.a, self.d, self.dt_bias))
        weights = SpaceWeights(a, d, bias, (0.0, 1.5))
        output: torch.Tensor = ops.mamba2_scan(*inputs, weights, states, step)
        return output

    def naive(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = (tensor.double() for tensor in inputs)
        state = torch.zeros(self.state_shape, dtype=torch.float64)
        outputs, states = [], []
        for t in range(len(x)):
            time = F.softplus(dt[t] + self.dt_bias.double()).clamp(0.0, 1.5)[:, None, None]
            own_b = b[t].repeat_interleave(self.heads // self.groups, 0)[:, None]
            own_c = c[t].repeat_interleave(self.heads // self.groups, 0)[:, None]
            decay = torch.exp(time * self.a.double()[:, None, None])
            state = decay * state + time * x[t][..., None] * own_b
            outputs.append((state * own_c).sum(-1) + self.d.double()[:, None] * x[t])
            states.append(state)
        return torch.stack(outputs), torch.stack(states)


class Delta:
    def __init__(
        self, key_heads: int = 2, heads: int = 4, key_dim: int = 6, value_dim: int = 3
    ) -> None:
        self.key_heads, self.heads = key_heads, heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.state_shape = (heads, key_dim, value_dim)

    def tokens(self, count: int) -> list[torch.Tensor]:
        return [
            torch.randn(count, self.key_heads, self.key_dim),
            torch.randn(count, self.key_heads, self.key_dim),
            torch.randn(count, self.heads, self.value_dim),
            -torch.rand(count, self.heads) * 2,
            torch.rand(count, self.heads),
        ]

    def run(
        self, ops: ModuleType, inputs: list[torch.Tensor], states: torch.Tensor, step: StateStep
    ) -> torch.Tensor:
        output: torch.Tensor = ops.gated_delta_rule(*inputs, states, step)
        return output

    def naive(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, g, beta = (tensor.double() for tensor in inputs)
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        query = query / self.key_dim**0.5
        state = torch.zeros(self.state_shape, dtype=torch.float64)
        outputs, states = [], []
        for t in range(len(query)):
            q, k = (x[t].repeat_interleave(self.heads // self.key_heads, 0) for x in (query, key))
            state = state * g[t].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", k, state)
            change = (value[t] - known) * beta[t][:, None]
            state = state + k[..., None] * change[:, None]
            outputs.append(torch.einsum("hk,hkv->hv", q, state))
            states.append(state)
        return torch.stack(outputs), torch.stack(states)


Layer = Conv | Mamba | Delta


class Steps:
    """Requests of one layer, computed as a schedule says, in memory that is poisoned."""

    def __init__(
        self,
        layer: Layer,
        lengths: list[int],
        block_size: int,
        ops: ModuleType,
        device: torch.device | None = None,
    ) -> None:
        self.layer, self.lengths, self.block_size, self.ops = layer, lengths, block_size, ops
        self.device = device or torch.device("cpu")
        num_blocks = [-(-(length + MAX_WRONG) // block_size) for length in lengths]
        ids = torch.randperm(sum(num_blocks)) + 1
        self.table = torch.zeros(len(lengths), max(num_blocks) + 1, dtype=torch.int32)
        for index, blocks in enumerate(ids.split(num_blocks)):
            self.table[index, : len(blocks)] = blocks
        shape = (sum(num_blocks) + 1, *layer.state_shape)
        self.states = torch.full(shape, float("nan"), device=self.device)
        self.inputs = [layer.tokens(length) for length in lengths]
        self.computed = [0] * len(lengths)
        first = layer.naive(self.inputs[0])[0][0]
        self.outputs = [torch.full((n, *first.shape), float("nan")) for n in lengths]

    def run(
        self,
        counts: dict[int, int],
        num_padding: int = 0,
        wrong: dict[int, int] | None = None,
        padded: bool = False,
    ) -> None:
        """One step of so many tokens a request. Padding, of single tokens, has a stale table.

        Requests in `wrong` compute one token and drafts: those that hold, and then so many that do
        not. In a padded step with drafts, nobody knows which requests have some.
        """
        wrong = wrong or {}
        drafting = {index for index in wrong if counts[index] + wrong[index] > 1}
        order = sorted(counts, key=lambda index: (index in drafting, counts[index] > 1))
        kept = [counts[index] for index in order]
        lens = [counts[index] + wrong.get(index, 0) for index in order]
        ends = [self.computed[index] + length for index, length in zip(order, lens, strict=True)]
        assert padded or not num_padding or all(length == 1 for length in lens)
        starts = torch.tensor([0, *lens]).cumsum(0)
        pad = [0] * num_padding
        stale = self.table[:1].expand(num_padding, -1)
        metadata = AttentionMetadata(
            query_starts=torch.cat([starts, starts[-1:].expand(num_padding)]).int().to(self.device),
            seq_lens=torch.tensor([*ends, *pad], dtype=torch.int32, device=self.device),
            block_table=torch.cat([self.table[order], stale]).to(self.device),
            slot_mapping=torch.zeros(
                sum(lens) + num_padding, dtype=torch.int64, device=self.device
            ),
            num_decodes=len(order) + num_padding
            if padded
            else sum(length == 1 for length in lens) + num_padding,
            max_query_len=max(lens),
            max_seq_len=max(ends),
            num_drafting=0 if padded else len(drafting),
            decode_rows=8 if padded else 1,
        )
        step = state_step(metadata, self.block_size)
        inputs = []
        for number in range(len(self.inputs[0])):
            rows = []
            for index, count, length in zip(order, kept, lens, strict=True):
                start = self.computed[index]
                true = self.inputs[index][number][start : start + count]
                rows += [true, torch.randn(length - count, *true.shape[1:])]
            rows += [torch.full_like(rows[0][:1], float("nan"))] * num_padding
            inputs.append(torch.cat(rows).to(self.device))
        output = self.layer.run(self.ops, inputs, self.states, step).cpu()
        if step.drafts is not None:
            rows = step.drafts.step_rows
            num = len(step.drafts.seq_lens) - num_padding
            accepted = torch.tensor([count - 1 for count in kept[-num:]] + pad, dtype=torch.int32)
            replay = step.drafts.replay(accepted.to(self.device))
            again = self.layer.run(self.ops, [x[rows] for x in inputs], self.states, replay).cpu()
            if isinstance(self.layer, Conv):  # the next op reads what it gives
                for start, end in zip(starts[-num - 1 :].tolist(), kept[-num:], strict=False):
                    own = slice(start + 1, start + end)
                    close(
                        again[own.start - rows.start : own.stop - rows.start],
                        output[own].double(),
                        1e-6,
                    )
        self.padding = output[sum(lens) :]
        for index, count, own in zip(order, kept, output[: sum(lens)].split(lens), strict=True):
            start = self.computed[index]
            self.outputs[index][start : start + count] = own[:count]
            self.computed[index] = start + count

    def full_blocks(self) -> list[int]:
        """Blocks that others may share: none of them may be written again."""
        return [
            int(block)
            for index, done in enumerate(self.computed)
            for block in self.table[index, : done // self.block_size]
        ]

    def check(self, tolerance: float = 2e-5) -> None:
        """Outputs and stored states are those of the recurrence."""
        for index, done in enumerate(self.computed):
            if not done:
                continue
            outputs, states = self.layer.naive(self.inputs[index])
            close(self.outputs[index][:done], outputs[:done], tolerance)
            ends = [*range(self.block_size, done, self.block_size), done]
            blocks = self.table[index, : len(ends)].long()
            close(self.states.cpu()[blocks], states[[end - 1 for end in ends]], tolerance)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
