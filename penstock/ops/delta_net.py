"""The gated delta rule in plain torch: one token at a time, or a chunk at a time as a matmul.

A head's state S [key_dim, value_dim] maps keys to values. Each token first decays it by exp(g).
Then the value stored for the token's key moves towards the token's value by the fraction beta: S' =
exp(g) S + k (beta (v - k^T exp(g) S)). The output is q^T S'. Queries and keys are normalized to
length 1. Everything is float32, because a state lives as long as its request.
"""

from __future__ import annotations

import torch

from penstock.ops.recurrent import StateChunks, StateStep, fresh_or

EPS = 1e-6  # added under the root when a query or key is normalized


def gated_delta_rule(
    query: torch.Tensor,  # [num_tokens, key_heads, key_dim]
    key: torch.Tensor,  # the same
    value: torch.Tensor,  # [num_tokens, heads, value_dim]; heads / key_heads of them share a key
    g: torch.Tensor,  # [num_tokens, heads] float32: log of the decay
    beta: torch.Tensor,  # [num_tokens, heads] float32
    states: torch.Tensor,  # [num_blocks, heads, key_dim, value_dim] float32
    step: StateStep,
) -> torch.Tensor:
    """Each token's output [num_tokens, heads, value_dim], float32. Updates the states."""
    output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    n = step.num_decodes
    if n:
        state = fresh_or(states[step.read_blocks], step.is_fresh)
        output[:n], states[step.write_blocks] = _update(
            query[:n], key[:n], value[:n], g[:n], beta[:n], state
        )
    if step.chunks is not None:
        rows = step.chunks.step_rows
        output[rows] = delta_chunks(
            query[rows], key[rows], value[rows], g[rows], beta[rows], states, step.chunks
        )
    if step.drafts is not None:
        rows = step.drafts.step_rows
        q, k, v, decay, rate = (each[rows] for each in (query, key, value, g, beta))
        output[rows] = step.drafts.compute(
            states,
            output.new_zeros(v.shape),
            lambda own, state: _update(q[own], k[own], v[own], decay[own], rate[own], state),
        )
    return output


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,  # [n, heads, key_dim, value_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of one token of each request, and the states after them."""
    shared_by = value.shape[1] // key.shape[1]
    query = _unit(query) * query.shape[-1] ** -0.5
    query = query.repeat_interleave(shared_by, dim=1)[:, :, None]  # [n, heads, 1, key_dim]
    key = _unit(key).repeat_interleave(shared_by, dim=1)
    state = state * g.exp()[..., None, None]
    known = (key[:, :, None] @ state)[:, :, 0]  # [n, heads, value_dim]
    change = (value.float() - known) * beta[..., None]
    state = state + key[..., None] * change[:, :, None]
    return (query @ state)[:, :, 0], state


def delta_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunks: StateChunks,
) -> torch.Tensor:
    """`gated_delta_rule` for the rows of a step's longer queries.

    Each token's update depends on the earlier updates in its chunk. Together they solve a
    triangular system, which is solved before the state at the start of the chunk is known.
    """
    shared_by = value.shape[1] // key.shape[1]

    def heads_first(x: torch.Tensor) -> torch.Tensor:  # [chunks, heads, size, ...]
        return chunks.take(x).transpose(1, 2)

    query = heads_first(_unit(query) * query.shape[-1] ** -0.5)
    query = query.repeat_interleave(shared_by, dim=1)
    key = heads_first(_unit(key)).repeat_interleave(shared_by, dim=1)
    beta = heads_first(beta)[..., None]  # zero for padding, which then changes nothing
    value = heads_first(value.float()) * beta
    # Cumulative sums in float64: only their differences matter, and those can be much smaller.
    faded = torch.cumsum(heads_first(g).double(), dim=-1)  # [chunks, heads, size]
    between = (faded[..., :, None] - faded[..., None, :]).float()
    future = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=g.device).triu(1)
    decay = between.masked_fill_(future, float("-inf")).exp_()
    since_start = faded.exp().float()[..., None]

    overlap = (key * beta) @ key.transpose(-1, -2) * decay  # the solver takes its diagonal as ones
    wanted = torch.cat([value, key * beta * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    change, known = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = query @ key.transpose(-1, -2) * decay
    # One product reads the state for both: the keys' stored values, and the queries.
    readers = torch.cat([known, query * since_start], dim=-2)
    writers = (key * (faded[..., -1:] - faded).exp().float()[..., None]).transpose(-1, -2)
    whole = faded[..., -1].exp().float()[..., None, None]

    output = torch.empty_like(value)
    state = chunks.initial(states)
    for part in chunks.rounds:
        own = part.chunks
        state = state[: part.count]
        seen, output[own] = (readers[own] @ state).chunk(2, dim=-2)
        change[own] -= seen
        state = state * whole[own]
        state.flatten(0, 1).baddbmm_(writers[own].flatten(0, 1), change[own].flatten(0, 1))
        part.store(states, state)
    output += scores @ change
    return chunks.restore(output.transpose(1, 2))
