"""What LoRA costs on a CPU: engines without it, with it but unused, and with an adapter, in turn.

    python benchmarks/cpu_lora.py --rows 16 --rounds 8

The adapter is random, of rank 16 on all linear layers of the default model. Prints medians of the
CPU time of one thread, which other load on the machine changes least, and of the speeds relative to
the engine without LoRA in the same round.
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
    parser.add_argument("--rows", type=int, default=16, help="requests at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    shape = (args.rows, args.input_len)
    prompts = torch.randint(1, 10_000, shape, generator=draw).tolist()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    options = {"cpu_threads": 1, "enable_prefix_caching": False, "log_level": "warning"}
    times: dict[str, list[float]] = {"without LoRA": [], "no adapter": [], "one adapter": []}
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
                started = time.process_time()
                llm.generate(inputs, params, use_tqdm=False, lora_request=request)
                if number:  # the first round warms up
                    times[name].append(time.process_time() - started)
    for name, taken in times.items():
        rate = args.rows * args.output_len / statistics.median(taken)
        pairs = zip(times["without LoRA"], taken, strict=True)
        speed = statistics.median(base / own for base, own in pairs)
        print(f"{name:14} {rate:8.1f} output tokens per CPU second   {speed:.3f} x")


if __name__ == "__main__":
    main()
