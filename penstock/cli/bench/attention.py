"""`penstock bench attention`: measures the attention kernel of this device, one batch at a time."""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.common import add_run_arguments, positive_int, spread, write_report
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from penstock.ops.registry import Ops

GROUP = re.compile(r"(?P<count>\d+)?q(?P<query>\d+k?)(?:s(?P<length>\d+k?))?")


@dataclass(frozen=True)
class Request:
    """A request of a batch: the tokens that it computes, and its tokens in all."""

    query_len: int
    seq_len: int

    @property
    def num_scores(self) -> int:
        """Pairs of a computed token and a token that it attends to."""
        num_cached = self.seq_len - self.query_len
        return self.query_len * num_cached + self.query_len * (self.query_len + 1) // 2


def parse_batch(text: str) -> list[Request]:
    """Parse ``8q1s2k,q2k``: eight requests with one new token of 2048, and a prompt of 2048.

    A group is ``[COUNT]qLENGTH[sLENGTH]``: requests, new tokens each, tokens each in all (default:
    the new ones). ``k`` is 1024.
    """
    requests: list[Request] = []
    for part in re.split("[,_]", text):
        match = GROUP.fullmatch(part)
        if match is None:
            raise argparse.ArgumentTypeError(
                f"must be groups such as 8q1s2k or q2k with commas between them, got {text!r}"
            )
        query_len = _length(match["query"])
        seq_len = _length(match["length"] or match["query"])
        count = int(match["count"] or 1)
        if not 1 <= query_len <= seq_len or count < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} must have requests and new tokens, and s at least as large as q"
            )
        requests += [Request(query_len, seq_len)] * count
    return requests


def _length(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def batch_argument(text: str) -> tuple[str, list[Request]]:
    return text, parse_batch(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "batches",
        nargs="+",
        type=batch_argument,
        metavar="BATCH",
        help="Groups of requests, [COUNT]qLENGTH[sLENGTH], with commas between them. 8q1s2k,q2k: "
        "eight decodes at 2048 tokens and a prompt of 2048.",
    )
    for flag, default in (
        ("--num-heads", 32),
        ("--num-kv-heads", 8),
        ("--head-dim", 128),
        ("--block-size", 16),
    ):
        text = "%(default)s by default"
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cpu-backend", choices=("auto", "torch"), default="auto")
    add_run_arguments(parser, num_iters=20, warmup=3)


def run(args: argparse.Namespace) -> int:
    if args.num_heads % args.num_kv_heads:
        raise ConfigError("num_heads must be a multiple of num_kv_heads")
    device, ops, name = find_ops(args)
    rows = []
    for text, requests in args.batches:
        call = prepare(args, requests, device, ops)
        seconds = [timed(call, device) for _ in range(args.num_iters_warmup + args.num_iters)]
        itemsize = 4 if dtype_name(args, device) == "float32" else 2
        rows.append(summarize(args, text, requests, seconds[args.num_iters_warmup :], itemsize))
    setting = {
        "device": str(device),
        "kernels": name,
        "num_heads": args.num_heads,
        "num_kv_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "block_size": args.block_size,
        "dtype": dtype_name(args, device),
    }
    document = {"benchmark": "attention", **setting, "batches": rows}
    write_report(render(setting, rows), document, args.json)
    return 0


def dtype_name(args: argparse.Namespace, device: torch.device) -> str:
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    return automatic if args.dtype == "auto" else str(args.dtype)


def find_ops(args: argparse.Namespace) -> tuple[torch.device, Ops, str]:
    """The device, its ops, and the name of the backend."""
    from penstock.config.engine import DeviceConfig
    from penstock.models.backend import start_threads
    from penstock.ops.cpu import library
    from penstock.ops.registry import Ops
    from penstock.platforms.platform import detect_platform

    platform = detect_platform(DeviceConfig(device=args.device))
    if platform.device.type == "cuda":
        return platform.device, Ops("cuda"), "cuda"
    native = None if args.cpu_backend == "torch" else library.load()
    if native is None or args.dtype not in ("auto", "float32"):
        return platform.device, Ops("cpu"), "torch"
    start_threads(native, platform.cpu_threads)
    return platform.device, Ops("cpu-native"), "cpu-native"


def prepare(
    args: argparse.Namespace, requests: list[Request], device: torch.device, ops: Ops
) -> Callable[[], object]:
    """Fill a KV cache with random numbers. Returns the call to measure."""
    import numpy as np
    import torch

    from penstock.ops.attention import AttentionMetadata, HostLens

    ordered = sorted(requests, key=lambda request: request.query_len != 1)  # decodes come first
    query_lens = [request.query_len for request in ordered]
    seq_lens = [request.seq_len for request in ordered]
    starts = list(itertools.accumulate(query_lens, initial=0))
    num_blocks = [-(-length // args.block_size) for length in seq_lens]
    table = torch.zeros(len(ordered), max(num_blocks), dtype=torch.int32)
    blocks = torch.randperm(sum(num_blocks), dtype=torch.int32) + 1  # scattered, as in an engine
    first = 0
    for row, count in zip(table, num_blocks, strict=True):
        row[:count] = blocks[first : first + count]
        first += count
    dtype = getattr(torch, dtype_name(args, device))
    shape = (sum(num_blocks) + 1, 2, args.block_size, args.num_kv_heads, args.head_dim)
    cache = torch.randn(shape, dtype=dtype, device=device)
    query = torch.randn(starts[-1], args.num_heads, args.head_dim, dtype=dtype, device=device)
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        host_lens=HostLens(np.array(starts), np.array(seq_lens)),
    )
    return lambda: ops.paged_attention(query, cache, metadata, args.head_dim**-0.5)


def timed(call: Callable[[], object], device: torch.device) -> float:
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def summarize(
    args: argparse.Namespace,
    text: str,
    requests: list[Request],
    seconds: list[float],
    itemsize: int,
) -> dict[str, Any]:
    """Rates are of the median: computed as a causal mask needs, read once per request."""
    times = spread([value * 1e6 for value in seconds])
    num_scores = sum(request.num_scores for request in requests)
    num_tokens = sum(request.seq_len for request in requests)
    kv_bytes = num_tokens * 2 * args.num_kv_heads * args.head_dim * itemsize
    return {
        "batch": text,
        "num_requests": len(requests),
        "num_rows": sum(request.query_len for request in requests),
        "num_tokens": num_tokens,
        "us": times,
        "tflops": 4 * num_scores * args.num_heads * args.head_dim / times["p50"] / 1e6,
        "kv_gb_per_second": kv_bytes / times["p50"] / 1e3,
    }


def render(setting: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    head = ", ".join(f"{name} {value}" for name, value in setting.items())
    width = max(len("batch"), *(len(row["batch"]) for row in rows))
    lines = [head, f"{'batch':<{width}}{'rows':>8}{'us':>12}{'p99':>12}{'TFLOP/s':>10}{'GB/s':>10}"]
    for row in rows:
        lines.append(
            f"{row['batch']:<{width}}{row['num_rows']:>8}{row['us']['p50']:>12.1f}"
            f"{row['us']['p99']:>12.1f}{row['tflops']:>10.3f}{row['kv_gb_per_second']:>10.2f}"
        )
    return "\n".join(lines)
