"""`penstock plan`: what fits on given GPUs, and how fast it will be."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.cli.common import add_model_argument, take_model_argument
from penstock.config.cli import add_engine_arguments, engine_options_from_args
from penstock.planning.hardware import GPUS, NETWORK, choose_gpu, on_nodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("plan options")
    group.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="Number of GPUs. (default: 1)"
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"Kind of GPU: {', '.join(GPUS)}. (default: h200)",
    )
    for flag, unit, what in (
        ("--memory", "GIB", "Memory of a GPU in GiB"),
        ("--bandwidth", "TB/S", "Memory bandwidth of a GPU in TB/s"),
        ("--flops", "TFLOP/S", "Dense 16-bit TFLOP/s of a GPU"),
    ):
        group.add_argument(
            flag, type=float, metavar=unit, help=f"{what}, instead of that of --gpu."
        )
    group.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="Number of machines; each has an equal share of the GPUs. (default: 1)",
    )
    group.add_argument(
        "--network",
        type=float,
        default=NETWORK,
        metavar="GB/S",
        help=f"Network between machines, in GB/s for each GPU. (default: {NETWORK:g})",
    )
    group.add_argument(
        "--input-len", type=int, default=1024, metavar="N", help="Prompt tokens. (default: 1024)"
    )
    group.add_argument(
        "--output-len", type=int, default=256, metavar="N", help="Output tokens. (default: 256)"
    )
    group.add_argument("--json", action="store_true", help="Print the plan as JSON.")
    group.add_argument("--plot", type=Path, metavar="FILE", help="Also plot the plan as a PNG.")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    take_model_argument(args)
    options = engine_options_from_args(args)
    gpu = choose_gpu(args.gpu, args.memory, args.bandwidth, args.flops)
    gpu = on_nodes(gpu, args.gpus, args.nodes, args.network)
    if args.plot is not None:
        from penstock.cli.bench.plot import require_matplotlib

        require_matplotlib()
    from penstock.config import EngineConfig
    from penstock.loading.speculators import find_model

    config, source = find_model(EngineConfig.from_options({**options, "load_format": "dummy"}))
    # Imported here: a wrong option or name must fail before torch is imported.
    from penstock.planning.plan import Planner, as_document, make_plan
    from penstock.planning.report import text_of

    planner = Planner(config, source, gpu, args.input_len, args.output_len)
    plan = make_plan(planner, args.gpus)
    print(json.dumps(as_document(plan), indent=2) if args.json else text_of(plan))
    if args.plot is not None:
        from penstock.planning.plot import plot

        plot(plan, planner, args.plot)
    return 0
