"""The time of a sum over peer memory, with one process that plays both ranks on one GPU.

Both ranks' kernels run side by side and read the memory of the same GPU: this is the kernel's own
time, without a link between GPUs.

    PYTHONPATH=tests python benchmarks/gpu_peers.py
"""

from __future__ import annotations

import torch
from peer_players import Players

from penstock.ops.triton.peers import PeerMemory

NUM_CALLS, NUM_REPLAYS = 200, 20


def main() -> None:
    players = Players(2, 8 << 20)
    print("one process plays both ranks on one GPU; bfloat16, hidden size 4096")
    print("| rows | KiB | us per sum |")
    print("|---|---|---|")
    for rows in (1, 8, 32, 64, 128, 256, 512):
        xs = [torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

        def sums(rank: PeerMemory, xs: list[torch.Tensor] = xs) -> torch.Tensor:
            for _ in range(NUM_CALLS):
                rank.all_reduce(xs[rank.rank])
            return xs[rank.rank]

        graphs, _ = players.capture(sums)
        players.replay(graphs)
        us = players.replay(graphs, NUM_REPLAYS) * 1e3 / (NUM_REPLAYS * NUM_CALLS)
        print(f"| {rows} | {xs[0].nbytes / 1024:g} | {us:.2f} |")


if __name__ == "__main__":
    main()
