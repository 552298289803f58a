"""`penstock collect-env`: collects versions and hardware for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import penstock
from penstock.models.plugins import FoundPlugin, find_plugins
from penstock.ops.cpu import library

PACKAGES = (
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "msgspec",
    "pyzmq",
    "fastapi",
    "pydantic",
    "uvicorn",
    "httptools",
    "uvloop",
    "prometheus-client",
    "pyyaml",
    "tqdm",
    "llguidance",
    "xgrammar",
    "mcp",
    "gguf",
    "transformers",
    "triton",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run(args: argparse.Namespace) -> int:
    environment = collect()
    if args.json:
        print(json.dumps(environment, indent=2))
    else:
        print("\n".join(_lines(environment)))
    return 0


def collect() -> dict[str, Any]:
    """Collect all facts. A fact that is not available is None. Never raises."""
    return {
        "penstock": penstock.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory_gib": _memory_gib(),
        "cpu_library": library.describe(),
        "torch": _torch(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "plugins": {each.name: _plugin(each) for each in find_plugins()},
    }


def _plugin(found: FoundPlugin) -> dict[str, Any]:
    facts: dict[str, Any] = {"package": found.package}
    if found.plugin is None:
        return facts | {"error": found.error}
    return facts | {"models": dict(found.plugin.models), "ops": dict(found.plugin.ops)}


def package_version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    facts = _proc_fields("/proc/cpuinfo")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": facts.get("model name") or platform.processor() or None,
        "architecture": platform.machine() or None,
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "flags": facts.get("flags") or facts.get("Features"),
    }


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return round(size / 2**30, 1)


def _proc_fields(path: str) -> dict[str, str]:
    """The first value of each ``name : value`` line. Empty if the file does not exist."""
    fields: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        return {}
    return fields


def _torch() -> dict[str, Any] | None:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return {"version": package_version("torch"), "error": str(error)}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    try:
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append(
                {
                    "name": gpu.name,
                    "memory_gib": round(gpu.total_memory / 2**30, 1),
                    "compute_capability": f"{gpu.major}.{gpu.minor}",
                }
            )
    except RuntimeError as error:  # an incompatible driver
        facts["error"] = str(error)
    return facts


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    """Format nested facts as indented ``name: value`` lines."""
    lines = []
    for name, value in facts.items():
        match value:
            case dict() if not value:
                lines.append(f"{indent}{name}: none")
            case dict():
                lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
            case [dict(), *_]:
                numbered = {f"{name} {index}": item for index, item in enumerate(value)}
                lines += _lines(numbered, indent)
            case None | []:
                lines.append(f"{indent}{name}: none")
            case _:
                lines.append(f"{indent}{name}: {value}")
    return lines
