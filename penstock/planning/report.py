"""A plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from penstock.planning.hardware import GIB
from penstock.planning.plan import Plan, Split, assumptions

WIDTH = 100
SIZES = ("tp", "pp", "ep", "dp")  # pp and ep only if some way has more than 1
COLUMNS = (
    ("weights", "GiB/GPU"),
    ("KV cache", "GiB/GPU"),
    ("longest", "tokens"),
    ("requests", "at once"),
    ("first", "ms"),
    ("one request", "ms/token"),
    ("all requests", "ms/token"),
    ("output", "tokens/s"),
    ("prompts", "tokens/s"),
)


def text_of(plan: Plan) -> str:
    gpu = plan.gpu
    first = plan.splits[0]
    weights = f"{plan.dtype} with quantized weights" if plan.is_quantized else plan.dtype
    lines = [
        f"{plan.model} ({plan.architecture}), {weights}, KV cache in {plan.kv_dtype}, "
        f"up to {plan.max_model_len:,} tokens",
        f"{plan.num_gpus} x {gpu.name}: {gpu.memory_gib:g} GiB, {gpu.bandwidth:g} TB/s, "
        f"{gpu.flops:g} TFLOP/s each{_nodes(plan)}",
        f"Requests of {plan.input_len:,} input and {plan.output_len:,} output tokens. A token "
        f"takes {first.kv_bytes_per_token / 1024:.0f} KiB of a GPU's KV cache (tp={first.tp})",
        "",
        *_table(plan),
    ]
    for name, reason in plan.refused.items():
        lines += textwrap.wrap(f"{name}: {reason}", WIDTH)
    lines.append("")
    lines += _advice(plan)
    lines += ["", "Assumptions:"]
    for text in assumptions(plan):
        lines += textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _nodes(plan: Plan) -> str:
    if plan.num_gpus <= plan.gpu.per_node:
        return ""
    num_nodes = plan.num_gpus // plan.gpu.per_node
    return f"; {num_nodes} nodes, {plan.gpu.network:g} GB/s between them for each"


def _row(split: Split, sizes: Sequence[str]) -> list[str]:
    row = [
        *(str(getattr(split, name)) for name in sizes),
        f"{split.weight_bytes / GIB:.2f}",
        f"{split.kv_bytes / GIB:.1f}",
    ]
    if split.speed is None:
        return [*row, "does not fit" if not split.longest else f"{split.longest:,}"]
    speed = split.speed
    prompts, outputs = speed.in_all(split.dp)
    count = f"{split.num_requests:,}" if split.dp == 1 else f"{split.dp} x {split.num_requests:,}"
    decodes = [f"{speed.token * 1e3:.2f}", f"{speed.batch_token * 1e3:.1f}", f"{outputs:,.0f}"]
    return [
        *row,
        f"{split.longest:,}",
        count,
        f"{speed.first_token * 1e3:.0f}",
        *(decodes if speed.token else ["-", "-", "-"]),
        f"{prompts:,.0f}",
    ]


def _table(plan: Plan) -> list[str]:
    sizes = [
        name
        for name in SIZES
        if name in ("tp", "dp") or any(getattr(own, name) > 1 for own in plan.splits)
    ]
    columns = [*((name, "") for name in sizes), *COLUMNS]
    rows = [list(part) for part in zip(*columns, strict=True)]
    rows += [_row(split, sizes) for split in plan.splits]
    widths = [
        max(len(row[at]) for row in rows if len(row) == len(columns)) for at in range(len(columns))
    ]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def _advice(plan: Plan) -> list[str]:
    best, fastest = plan.best, plan.fastest
    lines = [f"Highest throughput: {_flags(best)}"]
    if fastest.speed is not None and fastest.speed.token and fastest != best:
        lines.append(f"Least time per token: {_flags(fastest)}")
    if best.longest < plan.max_model_len:
        lines.append(
            f"The KV cache holds requests of at most {best.longest:,} tokens: "
            f"--max-model-len {best.longest}"
        )
    return lines


def _flags(split: Split) -> str:
    flags = [f"--tensor-parallel-size {split.tp}"]
    flags += [f"--pipeline-parallel-size {split.pp}"] if split.pp > 1 else []
    flags += [f"--data-parallel-size {split.dp}"] if split.dp > 1 else []
    flags += ["--enable-expert-parallel"] if split.ep > 1 else []
    return " ".join(flags)
