"""Far more adapters than slots, in random traffic: each request gets its own adapter's tokens."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from adapters import ATTENTION, MakeCheckpoint, make_adapter
from safetensors.torch import load_file, save_file
from tiny_engine import open_llm

from penstock import LLM, SamplingParams
from penstock.config import LoadConfig, ModelConfig
from penstock.engine.lora_requests import with_adapters
from penstock.executor.in_process import InProcessExecutor
from penstock.loading.adapters.source import adapter_digest
from penstock.loading.source import resolve_source
from penstock.protocol.adapter import Adapter
from penstock.protocol.outputs import RequestOutput
from penstock.protocol.sampling import OutputKind

NUM_ADAPTERS, NUM_SLOTS, NUM_COPIES = 200, 4, 16
MAX_UNFINISHED = 48  # requests


Bits = tuple[tuple[int, ...], tuple[float, ...]]  # of a request: its tokens and their logprobs


def make_adapters(
    root: Path, shapes: Mapping[str, Sequence[int]], config: str, scale: float
) -> list[Adapter]:
    """Random adapters with these tensors."""
    adapters = []
    for index in range(NUM_ADAPTERS):
        folder = root / f"adapter-{index}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(index)
        tensors = {
            name: (scale * torch.randn(*shape, generator=generator)).half()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(config)
        adapters.append(Adapter(folder.name, adapter_digest(folder), str(folder)))
    return adapters


def run_traffic(
    llm: LLM,
    rng: random.Random,
    adapters: Sequence[Adapter],
    num_requests: int,
    num_tokens: int,
    observe: Callable[[], None] = lambda: None,
) -> list[tuple[str, Bits]]:
    """Requests for random adapters that come at random times: each one's adapter and tokens.

    Host memory holds no more adapters than it may, at any time. `observe` is called once a step.
    """
    assert isinstance(llm.engine.executor, InProcessExecutor)
    store = llm.engine.executor.worker.adapters
    assert store is not None
    names = [adapter.name for adapter in adapters]
    # A few are popular, as customers are. Every one is asked for.
    weights = [1 / (1 + rank) for rank in range(len(names))]
    picked = rng.choices(adapters, weights, k=num_requests - len(adapters)) + list(adapters)
    rng.shuffle(picked)
    waiting, sent, ended = list(enumerate(picked)), {}, []
    while waiting or sent:
        num_new = min(rng.choice([0, 1, 4]), len(waiting), MAX_UNFINISHED - len(sent))
        for _ in range(num_new):
            index, adapter = waiting.pop()
            request = prepare(llm, f"r{index}", num_tokens)
            (request,) = with_adapters([request], [adapter])
            sent[request.request_id] = request, adapter
            llm._submit([request])
        llm._step()
        assert len(store.digests) <= NUM_COPIES
        observe()
        for request_id, (request, adapter) in list(sent.items()):
            if request.assembler.finished:
                del sent[request_id]
                ended.append((adapter.name, bits_of(request.assembler.take())))
    llm._withdraw([])
    assert len(ended) == num_requests
    return ended


def prepare(llm: LLM, request_id: str, num_tokens: int):  # type: ignore[no-untyped-def]
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        output_kind=OutputKind.FINAL_ONLY,
    )
    return llm.frontend.prepare(request_id, list(range(20, 40)), params)


def bits_of(output: RequestOutput | None) -> Bits:
    assert output is not None
    assert output.error is None
    completion = output.outputs[0]
    assert completion.logprobs is not None
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(completion.token_ids), tuple(row[token].logprob for token, row in rows)


def bits_alone(llm: LLM, adapters: Sequence[Adapter], num_tokens: int) -> dict[str, Bits]:
    alone = {}
    for adapter in adapters:
        requests = with_adapters([prepare(llm, adapter.name, num_tokens)], [adapter])
        (output,) = llm._run(requests, use_tqdm=False)
        alone[adapter.name] = bits_of(output)
    return alone


def check_stats(llm: LLM) -> None:
    stats = llm.engine.adapter_stats()
    assert stats is not None
    assert (stats.running, stats.waiting) == ([], [])
    assert stats.most_overtakes <= llm.engine.limits.max_num_seqs
    assert stats.num_waits > 0
    print(f"longest wait {stats.longest_wait_s:.3f} s, most overtakes {stats.most_overtakes}")


def test_every_request_ends_with_its_own_adapters_tokens(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    first = make_adapter(tmp_path / "first", checkpoint, r=16, target_modules="all-linear")
    tensors = load_file(first / "adapter_model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = (first / "adapter_config.json").read_text()
    adapters = make_adapters(tmp_path, shapes, config, 0.2)
    options = {"enable_lora": True, "max_loras": NUM_SLOTS, "max_cpu_loras": NUM_COPIES}
    with open_llm(checkpoint, max_num_seqs=8, **options) as llm:
        ended = run_traffic(llm, random.Random(0), adapters, 300, 6)
        check_stats(llm)
        alone = bits_alone(llm, adapters, 6)
    assert len(set(alone.values())) == len(adapters)
    assert [name for name, bits in ended if alone[name] != bits] == []


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: the adapters have 700 MB."""
    with TemporaryDirectory(dir=tmp_path) as folder:
        yield Path(folder)


def attention_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Of an adapter's matrices of rank 16 for the attention layers of a Llama."""
    config = resolve_source(ModelConfig(model=model), LoadConfig()).config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_size = hidden // heads * config["num_key_value_heads"]
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in zip(ATTENTION, (hidden, kv_size, kv_size, hidden), strict=True):
            own = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{own}.lora_A.weight"] = (16, hidden)
            shapes[f"{own}.lora_B.weight"] = (size, 16)
    return shapes


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def used_bytes() -> int:
    """Resident memory without what the allocator keeps free, which varies from run to run."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    return resident_bytes()


@pytest.mark.slow
def test_the_default_model_serves_two_hundred_adapters_in_flat_memory(
    default_model: str, scratch: Path
) -> None:
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ATTENTION}
    shapes = attention_shapes(default_model)
    adapters = make_adapters(scratch, shapes, json.dumps(config), 0.05)
    one = sum(path.stat().st_size for path in Path(adapters[0].path).iterdir())
    rng = random.Random(0)
    resident: list[list[int]] = []  # bytes after each step, of each half
    used: list[int] = []  # bytes after each half
    ended = []
    with LLM(
        default_model,
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        enable_lora=True,
        max_loras=NUM_SLOTS,
        max_cpu_loras=NUM_COPIES,
    ) as llm:
        for _ in range(2):
            resident.append(half := [])
            ended += run_traffic(
                llm, rng, adapters, 300, 8, lambda own=half: own.append(resident_bytes())
            )
            used.append(used_bytes())
        check_stats(llm)
        stats = llm.engine.adapter_stats()
        alone = bits_alone(llm, adapters, 8)
    assert stats is not None
    assert stats.num_evictions > 2 * NUM_ADAPTERS - NUM_COPIES
    assert len(set(alone.values())) == len(adapters)
    assert [name for name, bits in ended if alone[name] != bits] == []
    for half, after in zip(resident, used, strict=True):
        print(f"resident: at most {max(half) >> 20} MiB, {after >> 20} MiB at the end")
    # The second half reads every adapter again. If one in eight stayed, this would fail.
    assert used[1] - used[0] < NUM_ADAPTERS // 8 * one
