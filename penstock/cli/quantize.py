"""`penstock quantize`: writes a quantized checkpoint and compares its perplexity."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.common import sigterm_unwinds
from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.quantize.perplexity import Perplexity
    from penstock.quantize.write import Report

METHODS = {
    "fp8": "e4m3 weights, a scale for each row; activations in fp8, scaled token by token",
    "int8": "8-bit weights, a scale for each row; activations in 8 bits, scaled token by token",
    "w4a16": "4-bit weights, a scale for each group of columns; activations stay floats",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A folder with config.json and 16- or 32-bit safetensors, or a Hugging Face model ID.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="Output folder; must not exist.")
    parser.add_argument(
        "--method",
        required=True,
        choices=METHODS,
        help="; ".join(f"{name}: {text}" for name, text in METHODS.items()) + ".",
    )
    parser.add_argument(
        "--group-size",
        type=_group_size,
        default=128,
        metavar="N",
        help="Group size of w4a16: 32, 64 or 128. (default: 128)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Do not quantize linear layers whose names match this regular expression (from the "
        "start of the name). Can be given several times. Fused layers are kept together: q, k and "
        "v; gate and up. The LM head and routers are never quantized.",
    )
    parser.add_argument(
        "--calibration-text",
        type=Path,
        metavar="FILE",
        help="Calibrate scales on this UTF-8 text file: minimize the error of each layer's output "
        "instead of rounding to nearest. Experts are always rounded to nearest.",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="Text file to measure perplexity on; default: a short text included in Penstock.",
    )
    parser.add_argument(
        "--no-perplexity",
        action="store_true",
        help="Only write the checkpoint. Without --calibration-text this needs memory for one file "
        "of at most 5 GB, whatever the size of the model.",
    )


def _group_size(value: str) -> int:
    if value not in ("32", "64", "128"):
        raise argparse.ArgumentTypeError(f"must be 32, 64 or 128, got {value!r}")
    return int(value)


def run(args: argparse.Namespace) -> int:
    for pattern in args.keep:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--keep {pattern!r} is not a regular expression: {error}") from error
    # Imports only what finds the model: a wrong model must fail before torch is imported.
    from penstock.config import EngineConfig, LoadConfig, ModelConfig
    from penstock.loading.source import resolve_source
    from penstock.loading.tasks import choose_task

    source = resolve_source(ModelConfig(model=args.model), LoadConfig())
    from penstock.loading.write import check_target, check_unquantized
    from penstock.quantize import perplexity
    from penstock.quantize.methods import method_named
    from penstock.quantize.write import write_quantized

    check_unquantized(source, "use the 16- or 32-bit checkpoint that it was made from")
    check_target(args.out, source)
    text_path = args.text or perplexity.SAMPLE
    text = perplexity.read_text(text_path)
    calibration = None
    if args.calibration_text is not None:
        calibration = perplexity.read_text(args.calibration_text)
    before, moments = None, None
    generates = choose_task(EngineConfig(), source) == "generate"
    if calibration is not None and not generates:
        raise ConfigError(
            "--calibration-text is for models that generate text, and this is a pooling model: "
            "leave it out"
        )
    if not args.no_perplexity and not generates:
        print("no perplexity is measured: this is a pooling model, which generates no text")
    elif not args.no_perplexity or calibration is not None:
        with perplexity.open_for_windows(args.model, source.config) as llm:
            if not args.no_perplexity:
                windows = perplexity.windows_of(llm, text, text_path)
                before = perplexity.measure(llm, windows, "Perplexity before")
            if calibration is not None:
                windows = perplexity.windows_of(llm, calibration, args.calibration_text)
                moments = perplexity.observe(llm, windows)
    method = method_named(args.method, args.group_size)
    with sigterm_unwinds():
        report = write_quantized(source, args.out, method, args.keep, moments)
    _print_report(report, args.out)
    if before is not None:
        with perplexity.open_for_windows(str(args.out), source.config) as llm:
            windows = perplexity.windows_of(llm, text, text_path)
            _print_change(before, perplexity.measure(llm, windows, "Perplexity after"))
    return 0


def _print_report(report: Report, out: Path) -> None:
    share = report.bytes_after / report.bytes_before
    print(
        f"{out}: {len(report.quantized)} layers quantized, {report.bytes_before / 1e6:,.1f} MB -> "
        f"{report.bytes_after / 1e6:,.1f} MB ({share:.0%})"
    )
    for layer, reason in report.kept.items():
        print(f"  {layer} stays as it is: {reason}")


def _print_change(before: Perplexity, after: Perplexity) -> None:
    change, error = after.change(before)
    print(
        f"perplexity {before.value:.3f} -> {after.value:.3f} ({change:+.2%} ± {error:.2%}, "
        f"{len(after.logprobs)} tokens)"
    )
