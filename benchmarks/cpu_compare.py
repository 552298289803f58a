"""Penstock beside its peers on one CPU: the same requests, in turns, in one run.

    python benchmarks/cpu_compare.py --threads 2 --rounds 3
    python benchmarks/cpu_compare.py --engines penstock llama.cpp --json results.json

Engines: penstock, on GGUF blocks as they are and on floats; transformers (float32,
`pip install transformers gguf accelerate`); llama.cpp, which compiles for about ten minutes:

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python

Every round starts each engine in a process of its own, warms it up, and runs all workloads. Prompts
are token ids and end-of-text is ignored. Printed are medians over rounds, and penstock's ratio to
the best peer.
Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.cli.bench.workloads import Workload, named_workload
from penstock.config import LoadConfig, ModelConfig
from penstock.config.model import DEFAULT_MODEL
from penstock.loading.source import resolve_source

WORKLOADS = ("cpu_a", "cpu_p", "cpu_b", "cpu_c")
PACKAGES = {
    "penstock": "penstock",
    "penstock float32": "penstock",
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "llama.cpp F16": "llama_cpp",
}
PEERS = ("transformers", "llama.cpp", "llama.cpp F16")
METRICS = {  # whether less is better
    "cpu_a first token, ms": True,
    "cpu_a decode tok/s": False,
    "cpu_p prompt tok/s": False,
    "cpu_b output tok/s": False,
    "cpu_c output tok/s": False,
    "start, s": True,
    "peak RSS, MB": True,
}


class Engine(Protocol):
    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Generate exactly so many tokens for each prompt, greedily, all at once."""


class Penstock:
    gguf_compute = "auto"

    def __init__(self, path: Path, threads: int) -> None:
        from penstock import LLM

        self.llm = LLM(
            str(path),
            gguf_compute=self.gguf_compute,
            cpu_threads=threads,
            enable_prefix_caching=False,
            log_level="warning",
        )

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        from penstock import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


class PenstockFloat(Penstock):
    """On weights turned into floats, as transformers computes."""

    gguf_compute = "dequantize"


class Transformers:
    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        assert len(set(output_lens)) == 1, "a padded batch ends all at once"
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self.torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with self.torch.inference_mode():
            self.model.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None,
                min_new_tokens=output_lens[0], max_new_tokens=output_lens[0],
            )  # fmt: skip


class LlamaCpp:
    """Its low-level interface: the high-level one knows a single sequence."""

    BATCH = 512

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 32 * 640, 32
        params.n_batch = params.n_ubatch = self.BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        latest: dict[int, int] = {}
        for start in range(0, len(rows), self.BATCH):
            latest |= self._decode(rows[start : start + self.BATCH])
        for step in range(1, max(output_lens)):
            rows = [
                (latest[sequence], len(prompts[sequence]) + step - 1, sequence, True)
                for sequence in range(len(prompts))
                if step < output_lens[sequence]
            ]
            latest |= self._decode(rows)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute rows of (token, position, sequence, wanted); the next token of wanted ones."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        chosen = {}
        for index, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self.lib.llama_get_logits_ith(self.context, index)
                values = np.ctypeslib.as_array(logits, shape=(self.vocab_size,))
                chosen[sequence] = int(values.argmax())
        return chosen


class LlamaCppF16(LlamaCpp):
    """On weights requantized to 16 bits: more bytes, cheaper arithmetic for batches."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        wide = Path(tempfile.mkdtemp()) / "f16.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
        llama_cpp.llama_model_quantize(str(path).encode(), str(wide).encode(), params)
        super().__init__(wide, threads)
        wide.unlink()


ENGINES = {
    "penstock": Penstock,
    "penstock float32": PenstockFloat,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "llama.cpp F16": LlamaCppF16,
}


def seconds(engine: Engine, workload: Workload, output_len: int | None = None) -> float:
    lens = workload.output_lens if output_len is None else [output_len] * len(workload.prompts)
    started = time.perf_counter()
    engine.run(workload.prompts, lens)
    return time.perf_counter() - started


def measure(name: str, path: Path, threads: int) -> dict[str, float]:
    """All numbers of one engine, in this process."""
    started = time.perf_counter()
    engine = ENGINES[name](path, threads)
    engine.run([[1, 2, 3]], [1])
    results = {"start, s": time.perf_counter() - started}
    workloads = {key: named_workload(key) for key in WORKLOADS}
    engine.run(workloads["cpu_p"].prompts, [2])  # warm
    first = seconds(engine, workloads["cpu_a"], 1)
    whole = seconds(engine, workloads["cpu_a"])
    results["cpu_a first token, ms"] = first * 1e3
    results["cpu_a decode tok/s"] = (workloads["cpu_a"].output_lens[0] - 1) / (whole - first)
    prompt = workloads["cpu_p"]
    results["cpu_p prompt tok/s"] = prompt.num_input_tokens / seconds(engine, prompt)
    for key in ("cpu_b", "cpu_c"):
        outputs = sum(workloads[key].output_lens)
        results[f"{key} output tok/s"] = outputs / seconds(engine, workloads[key])
    results["peak RSS, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return results


def in_a_process_of_its_own(name: str, model: str, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", model, "--threads", str(threads)]
    done = subprocess.run([*command, "--measure", name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return report


def table(medians: dict[str, dict[str, float]]) -> str:
    lines = ["| | " + " | ".join([*medians, "penstock to the best peer"]) + " |"]
    lines.append("|---" * (len(medians) + 2) + "|")
    for metric, less_is_better in METRICS.items():
        cells = [f"{results[metric]:.4g}" for results in medians.values()]
        peers = [results[metric] for name, results in medians.items() if name in PEERS]
        ratio = ""
        if peers and "penstock" in medians:
            best = min(peers) if less_is_better else max(peers)
            ratio = f"{medians['penstock'][metric] / best:.2f}x"
        lines.append(f"| {metric} | " + " | ".join([*cells, ratio]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="Default: those installed.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Whatever leads to a GGUF file.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="Write every number here.")
    parser.add_argument("--measure", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        source = resolve_source(ModelConfig(model=args.model), LoadConfig())
        assert source.gguf is not None, "the model must be a GGUF file, which all engines read"
        print(json.dumps(measure(args.measure, source.gguf.path, args.threads)))
        return
    engines = args.engines or [
        name for name, package in PACKAGES.items() if importlib.util.find_spec(package)
    ]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(args.rounds):
        for name in engines:
            results = in_a_process_of_its_own(name, args.model, args.threads)
            rounds[name].append(results)
            shown = ", ".join(f"{metric} {results[metric]:.4g}" for metric in METRICS)
            print(f"round {number + 1}, {name}: {shown}", file=sys.stderr)
    medians: dict[str, dict[str, Any]] = {
        name: {metric: statistics.median(run[metric] for run in runs) for metric in METRICS}
        for name, runs in rounds.items()
    }
    print(table(medians))
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "rounds": rounds}, indent=2))


if __name__ == "__main__":
    main()
