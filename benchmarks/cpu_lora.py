"""What LoRA costs on a CPU: engines without it, with it but unused, and with an adapter, in turn.

    python benchmarks/cpu_lora.py --workload cpu_b --threads 2 --rounds 8

The workloads are those of `cpu_compare.py`. The adapter is random, of rank 16 on all linear layers
of the default model. Prints medians of the output tokens per second and per second of CPU time,
which other load on the machine changes least. Both are also compared with the engine without LoRA
in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.cli.bench.workloads import named_workload

WORKLOADS = ("cpu_a", "cpu_b", "cpu_c", "cpu_p")
NUM_LAYERS, HIDDEN, MIDDLE, KEYS = 30, 576, 1536, 192
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}


def write_adapter(folder: Path, rank: int) -> None:
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, (out_features, in_features) in SHAPES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = 0.01 * torch.randn(rank, in_features)
            tensors[f"{module}.lora_B.weight"] = 0.01 * torch.randn(out_features, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="cpu_b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    workload = named_workload(args.workload)
    inputs = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in workload.output_lens
    ]
    options = {"cpu_threads": args.threads, "enable_prefix_caching": False, "log_level": "warning"}
    walls: dict[str, list[float]] = {"without LoRA": [], "no adapter": [], "one adapter": []}
    times: dict[str, list[float]] = {name: [] for name in walls}
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), args.rank)
        adapter = LoRARequest("adapter", 1, folder)
        plain = LLM(**options)
        lora = LLM(**options, enable_lora=True, max_lora_rank=args.rank)
        cases = {
            "without LoRA": (plain, None),
            "no adapter": (lora, None),
            "one adapter": (lora, adapter),
        }
        for number in range(args.rounds + 1):
            order = list(cases) if number % 2 else list(cases)[::-1]
            for name in order:
                llm, request = cases[name]
                wall, started = time.perf_counter(), time.process_time()
                llm.generate(inputs, params, use_tqdm=False, lora_request=request)
                if number:  # the first round warms up
                    times[name].append(time.process_time() - started)
                    walls[name].append(time.perf_counter() - wall)
    num_tokens = sum(workload.output_lens)
    print(f"{args.workload}, {args.threads} threads: output tokens per second, and of CPU time")
    for name in walls:
        shown = (f"{one:8.1f} {two:.3f} x" for one, two in
                 (speeds(of, name, num_tokens) for of in (walls, times)))  # fmt: skip
        print(f"{name:14}", *shown, sep="   ")


def speeds(seconds: dict[str, list[float]], name: str, num_tokens: int) -> tuple[float, float]:
    """Medians: tokens per second, and the speed relative to the engine without LoRA."""
    pairs = zip(seconds["without LoRA"], seconds[name], strict=True)
    relative = statistics.median(base / own for base, own in pairs)
    return num_tokens / statistics.median(seconds[name]), relative


if __name__ == "__main__":
    main()
