"""Mamba-2's state space model in plain torch: token by token, or chunk by chunk as a matmul.

Each token updates a head's state S [head_dim, state_size] to exp(dt * a) * S + dt * x b^T. The
output is S c + d * x. Everything is float32, because a state lives as long as its request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.ops.recurrent import StateChunks, StateStep, fresh_or


@dataclass(frozen=True)
class SpaceWeights:
    """The weights of a layer's heads, all float32."""

    a: torch.Tensor  # [heads], negative
    d: torch.Tensor  # [heads]
    dt_bias: torch.Tensor  # [heads]
    dt_limit: tuple[float, float]

    def time_steps(self, dt: torch.Tensor) -> torch.Tensor:
        """The time step of each token, from the projected dt [n, heads]."""
        return F.softplus(dt.float() + self.dt_bias).clamp(*self.dt_limit)


def mamba2_scan(
    x: torch.Tensor,  # [num_tokens, heads, head_dim]
    dt: torch.Tensor,  # [num_tokens, heads], as projected
    b: torch.Tensor,  # [num_tokens, groups, state_size]; heads / groups heads share one
    c: torch.Tensor,  # the same
    weights: SpaceWeights,
    states: torch.Tensor,  # [num_blocks, heads, head_dim, state_size] float32
    step: StateStep,
) -> torch.Tensor:
    """Each token's output [num_tokens, heads, head_dim], float32. Updates the states."""
    output = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n = step.num_decodes
    if n:
        state = fresh_or(states[step.read_blocks], step.is_fresh)
        output[:n], states[step.write_blocks] = _update(x[:n], dt[:n], b[:n], c[:n], weights, state)
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = mamba2_chunks(
            x[rows], dt[rows], b[rows], c[rows], weights, states, step.chunks
        )
    if step.drafts is not None:
        rows = step.drafts.step_rows
        x, dt, b, c = (each[rows] for each in (x, dt, b, c))
        output[rows] = step.drafts.compute(
            states,
            output.new_zeros(x.shape),
            lambda own, state: _update(x[own], dt[own], b[own], c[own], weights, state),
        )
    return output


def _update(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SpaceWeights,
    state: torch.Tensor,  # [n, heads, head_dim, state_size]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of one token of each request, and the states after them."""
    heads_per_group = x.shape[1] // b.shape[1]
    x, dt = x.float(), weights.time_steps(dt)
    b = b.float().repeat_interleave(heads_per_group, dim=1)  # [n, heads, state_size]
    c = c.float().repeat_interleave(heads_per_group, dim=1)
    decay = torch.exp(dt * weights.a)[..., None, None]
    state = state * decay + (x * dt[..., None])[..., None] * b[:, :, None]
    return (state @ c[..., None])[..., 0] + weights.d[:, None] * x, state


def mamba2_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SpaceWeights,
    states: torch.Tensor,
    chunks: StateChunks,
) -> torch.Tensor:
    """`mamba2_scan` for the rows of a step's longer queries.

    Letters in shapes: m chunks, t and s tokens of a chunk, g head groups of h heads each, p
    head_dim, n state_size.
    """
    num, groups = len(x), b.shape[1]
    x32 = chunks.take(x.float().reshape(num, groups, -1, x.shape[-1]))  # [m, t, g, h, p]
    b, c = chunks.take(b.float()), chunks.take(c.float())  # [m, t, g, n]
    dt = weights.time_steps(dt)
    # Cumulative sums in float64: only their differences matter, and those can be much smaller.
    rate = chunks.take((dt * weights.a).double().view(num, groups, -1))  # no time passes in padding
    passed = rate.cumsum(dim=1).permute(0, 2, 3, 1)  # [m, g, h, t]
    between = (passed[..., :, None] - passed[..., None, :]).float()  # [m, g, h, t, s]
    future = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=x.device).triu(1)
    decay = between.masked_fill_(future, float("-inf")).exp_()

    moved = x32 * chunks.take(dt.view(num, groups, -1, 1))  # [m, t, g, h, p]
    scores = torch.einsum("mtgn,msgn->mgts", c, b)[:, :, None] * decay
    output = torch.einsum("mghts,msghp->mtghp", scores, moved)
    since_start = passed.exp().float().permute(0, 3, 1, 2)[..., None]  # [m, t, g, h, 1]
    to_end = (passed[..., -1:] - passed).exp().float().permute(0, 3, 1, 2)[..., None]
    whole = passed[..., -1].exp().float()[..., None, None]  # [m, g, h, 1, 1]

    # One matrix per head group, for all of its heads.
    readers = c.permute(0, 2, 3, 1)  # [m, g, n, t]
    written = b.transpose(1, 2)  # [m, g, t, n]
    writers = (moved * to_end).permute(0, 2, 3, 4, 1).flatten(2, 3)  # [m, g, h * p, t]
    read = torch.empty_like(writers)
    state = chunks.initial(states)
    state = state.view(len(state), groups, -1, *state.shape[2:])  # [requests, g, h, p, n]
    for part in chunks.rounds:
        own = part.chunks
        state = state[: part.count]
        torch.matmul(state.flatten(2, 3), readers[own], out=read[own])
        state = state * whole[own]
        in_groups = state.view(-1, read.shape[2], state.shape[-1])  # [requests * g, h * p, n]
        in_groups.baddbmm_(writers[own].flatten(0, 1), written[own].flatten(0, 1))
        part.store(states, state.flatten(1, 2))
    read = read.view(len(read), *state.shape[1:-1], -1).permute(0, 4, 1, 2, 3)
    output = output + read * since_start + weights.d.view(groups, -1, 1) * x32
    return chunks.restore(output.flatten(2, 3))
