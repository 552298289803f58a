"""What LoRA adapters cost on a GPU: the kernels, and whole steps with and without adapters.

    python benchmarks/gpu_lora.py MODEL [--json RESULTS]

MODEL is a folder with a config.json, of a dense decoder such as Qwen3-8B. Weights are dummies, and
adapters of all linear layers are random. The kernels are first compared with the reference, and
what they add to a layer is timed. Then three lines are measured against an engine without LoRA,
which runs before and after the other:

- steps without adapters, in an engine with LoRA: at most 1 % over
- 64 streams with 8 adapters: at most 15 % over
- one stream with an adapter: at most 25 % over

Times per token are those of `penstock bench latency`, medians over the iterations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

STREAMS = ("dec1", "dec64")
COPIES = 12  # of a layer, so that no cache holds their weights
LIMITS = {  # measured case -> its base and the largest ratio
    "dec1 without adapters": ("dec1", 1.01),
    "dec64 without adapters": ("dec64", 1.01),
    "dec64 with adapters": ("dec64", 1.15),
    "dec1 with an adapter": ("dec1", 1.25),
}


def layers_of(config: dict[str, Any]) -> dict[str, tuple[int, dict[str, int]]]:
    """The fused linear layers of a decoder layer: inputs, and outputs by part."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    return {
        "self_attn.qkv": (hidden, {"q_proj": heads * head_dim, "k_proj": kv, "v_proj": kv}),
        "self_attn.o": (heads * head_dim, {"o_proj": hidden}),
        "mlp.gate_up": (hidden, {"gate_proj": size, "up_proj": size}),
        "mlp.down": (size, {"down_proj": hidden}),
    }


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(config["num_hidden_layers"]):
        for name, (inputs, parts) in layers_of(config).items():
            for part, outputs in parts.items():
                module = f"base_model.model.model.layers.{index}.{name.partition('.')[0]}.{part}"
                for kind, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                    noise = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{module}.{kind}.weight"] = noise.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [part for _, own in layers_of(config).values() for part in own]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def check_kernels(config: dict[str, Any], rank: int, num_adapters: int) -> dict[str, float]:
    """Compare each layer with the reference; microseconds that adapters add to it, in a graph."""
    import torch
    import triton

    from penstock.ops.lora import LoraSlots, PartUpdate
    from penstock.ops.triton.linear import linear
    from penstock.ops.triton.lora import lora_slots
    from penstock.ops.triton.lora_tiles import DeviceAdapterStep

    device, dtype = torch.device("cuda"), torch.bfloat16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def median_us(calls: Sequence[Callable[[], object]]) -> float:
        """Of one call."""
        graph = torch.cuda.CUDAGraph()
        for call in calls:
            call()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return float(triton.testing.do_bench(graph.replay, return_mode="median")) * 1e3 / len(calls)

    def product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: linear(x, weight, None)

    times: dict[str, float] = {}
    for name, (inputs, parts) in layers_of(config).items():
        sizes = (num_adapters, inputs, [*parts.values()], rank, dtype, device)
        layers = []
        for _ in range(COPIES):
            weight = torch.nn.Parameter(draw(sum(parts.values()), inputs) * 0.02, False)
            layers.append((product(weight), lora_slots(*sizes)))
            layers[-1][1].join(weight, None)
        reference = LoraSlots(*sizes)
        for slot in range(num_adapters):
            for index, (_, slots) in enumerate(layers):
                own = [PartUpdate(draw(rank, inputs) * 0.02, draw(rank, n)) for n in parts.values()]
                slots.place(slot, own)
                if index == 0:
                    reference.place(slot, own)
        for n in (1, 7, 64, 256, 2048):
            x = draw(n, inputs)
            rows = (torch.arange(n, device=device) % (num_adapters + 1) - 1).int()
            rows[0] = 0
            step = DeviceAdapterStep.empty(rows, num_adapters).group()
            plain, slots = layers[0]
            expected = reference.add(x, plain(x), step)
            got = slots.run(x, plain, step)
            error = float((got - expected).abs().max() / expected.abs().max())
            if error > 0.03:
                raise SystemExit(f"{name}, {n} rows: the kernels differ by {error:.3f}")
            base = median_us([partial(plain, x) for plain, _ in layers])
            all_of_it = median_us([partial(slots.run, x, plain, step) for plain, slots in layers])
            times[f"{name}, {n} rows"] = all_of_it - base
    return times


def measure(model: str, adapters: list[str], rank: int, num_iters: int) -> dict[str, float]:
    """Milliseconds per token of one engine, by case. With adapters, it has LoRA."""
    from penstock import LLM
    from penstock.cli.bench.common import timed_run
    from penstock.cli.bench.workloads import named_workload
    from penstock.protocol.adapter import LoRARequest

    requests = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(adapters)]
    options: dict[str, Any] = {}
    if adapters:
        options = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": rank}
    found: dict[str, float] = {}
    with LLM(
        model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        log_level="warning", **options,
    ) as llm:  # fmt: skip

        def ms_per_token(name: str, own: list[LoRARequest | None]) -> float:
            workload = named_workload(name)
            first = replace(workload, output_lens=[1] * len(workload.prompts))
            times = []
            for _ in range(num_iters + 1):  # the first loads adapters and captures graphs
                spans = [
                    timed_run(llm, part, part.sampling_params(detokenize=False), own)
                    for part in (first, workload)
                ]
                steps = max(workload.output_lens) - 1
                times.append((spans[1] - spans[0]) / steps * 1e3)
            return statistics.median(times[1:])

        for name in STREAMS:
            nothing: list[LoRARequest | None] = [None] * len(named_workload(name).prompts)
            suffix = " without adapters" if adapters else ""
            found[f"{name}{suffix}"] = ms_per_token(name, nothing)
            if adapters:
                own = [requests[i % len(requests)] for i in range(len(nothing))]
                case = "dec1 with an adapter" if name == "dec1" else "dec64 with adapters"
                found[case] = ms_per_token(name, [*own])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-adapters", type=int, default=8)
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("kernels", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--adapter", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = json.loads((Path(args.model) / "config.json").read_text())
    if args.only == "kernels":
        print(json.dumps(check_kernels(config, args.rank, args.num_adapters)))
        return
    if args.only == "engine":
        print(json.dumps(measure(args.model, args.adapter, args.rank, args.num_iters)))
        return

    def run(*more: str) -> dict[str, float]:
        """In a process of its own, which gives all memory back."""
        command = [sys.executable, __file__, *sys.argv[1:], *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result

    import torch

    results: dict[str, Any] = {}
    if torch.cuda.is_available():
        results["kernels, microseconds"] = run("--only", "kernels")
        for name, time in results["kernels, microseconds"].items():
            print(f"{name:28} {time:8.2f} µs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"adapter-{index}") for index in range(args.num_adapters)]
        for index, path in enumerate(paths):
            write_adapter(path, config, args.rank, seed=index)
        before = run("--only", "engine")
        lora = run("--only", "engine", *(f"--adapter={path}" for path in paths))
        after = run("--only", "engine")
    base = {name: (before[name] + after[name]) / 2 for name in STREAMS}
    results |= {"base before, ms": before, "base after, ms": after, "lora, ms": lora}
    for case, (name, limit) in LIMITS.items():
        ratio = lora[case] / base[name]
        print(
            f"{case:24} {lora[case]:8.3f} ms, base {base[name]:8.3f} ms: {ratio:5.3f} x, "
            f"at most {limit} {'holds' if ratio <= limit else 'DOES NOT HOLD'}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
