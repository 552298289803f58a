"""Print the GPU table of docs/benchmarks.md from the JSON files that benchmarks/gpu.sh wrote.

python benchmarks/gpu_table.py RESULTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# File, what it is, the number in it, its format, vLLM 0.26 on the same machine.
LINES = (
    ("nano", "Qwen3-0.6B nano, output tokens/s", "output_tokens_per_s", ",.0f", "21,496"),
    ("dec1_small", "Qwen3-0.6B dec1, ms a token", "ms_per_token", ".2f", "2.24"),
    ("dec1", "Qwen3-8B dec1, ms a token", "ms_per_token", ".2f", "5.17"),
    ("dec64", "Qwen3-8B dec64, ms a step", "ms_per_token", ".2f", "6.97"),
    ("thr", "Qwen3-8B thr, output tokens/s", "output_tokens_per_s", ",.0f", "10,050"),
    ("pre", "Qwen3-8B pre, prompt tokens/s", "input_tokens_per_s", ",.0f", "40,491"),
    ("moe_dec1", "Qwen3-30B-A3B dec1, ms a token", "ms_per_token", ".2f", "4.15"),
    ("moe_dec64", "Qwen3-30B-A3B dec64, ms a step", "ms_per_token", ".2f", "18.1"),
    ("moe_thr", "Qwen3-30B-A3B thr, output tokens/s", "output_tokens_per_s", ",.0f", "11,681"),
    ("moe_pre", "Qwen3-30B-A3B pre, prompt tokens/s", "input_tokens_per_s", ",.0f", "64,037"),
    ("start_warm", "Qwen3-8B start to first token, s", "first_token_s", ".1f", "107-130"),
    ("start_cold", "the same, nothing compiled before, s", "first_token_s", ".1f", ""),
)


def main(folder: Path) -> None:
    print("| | Penstock | vLLM 0.26 |\n|---|---|---|")
    for name, title, key, form, peer in LINES:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        report = json.loads(path.read_text())
        if "elapsed_s" in report:
            report["input_tokens_per_s"] = report["num_input_tokens"] / report["elapsed_s"]
        value = report[key]
        value = value["p50"] if isinstance(value, dict) else value
        print(f"| {title} | {value:{form}} | {peer} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
