"""Far more adapters than slots, in random traffic: each request gets its own adapter's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from adapters import MakeCheckpoint, make_adapter
from safetensors.torch import load_file, save_file
from tiny_engine import open_llm

from penstock import LLM, SamplingParams
from penstock.engine.lora_requests import with_adapters
from penstock.executor.in_process import InProcessExecutor
from penstock.loading.adapters.source import adapter_digest
from penstock.protocol.adapter import Adapter
from penstock.protocol.sampling import OutputKind

NUM_ADAPTERS, NUM_SLOTS, NUM_COPIES = 200, 4, 16


def make_adapters(root: Path, checkpoint: Path, count: int, scale: float) -> list[Adapter]:
    """Random adapters of rank 16 for all linear layers."""
    first = make_adapter(root / "0", checkpoint, r=16, target_modules="all-linear")
    shapes = {name: t.shape for name, t in load_file(first / "adapter_model.safetensors").items()}
    config = (first / "adapter_config.json").read_text()
    adapters = []
    for index in range(count):
        folder = root / f"adapter-{index}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(index)
        tensors = {
            name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(config)
        adapters.append(Adapter(folder.name, adapter_digest(folder), str(folder)))
    return adapters


def run_traffic(
    llm: LLM, rng: random.Random, adapters: Sequence[Adapter], num_requests: int, num_tokens: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Requests for random adapters that come at random times: each one's adapter and tokens.

    Host memory holds no more adapters than it may, at any time.
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
        for _ in range(min(rng.choice([0, 1, 4]), len(waiting))):
            index, adapter = waiting.pop()
            request = prepare(llm, f"r{index}", num_tokens)
            (request,) = with_adapters([request], [adapter])
            sent[request.request_id] = request, adapter
            llm._submit([request])
        llm._step()
        assert len(store.digests) <= NUM_COPIES
        for request_id, (request, adapter) in list(sent.items()):
            if request.assembler.finished:
                del sent[request_id]
                output = request.assembler.take()
                assert output is not None
                assert output.error is None
                ended.append((adapter.name, tuple(output.outputs[0].token_ids)))
    llm._withdraw([])
    assert len(ended) == num_requests
    return ended


def prepare(llm: LLM, request_id: str, num_tokens: int):  # type: ignore[no-untyped-def]
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
    )
    return llm.frontend.prepare(request_id, list(range(20, 40)), params)


def tokens_alone(llm: LLM, adapters: Sequence[Adapter], num_tokens: int) -> dict[str, tuple]:
    alone = {}
    for adapter in adapters:
        requests = with_adapters([prepare(llm, adapter.name, num_tokens)], [adapter])
        (output,) = llm._run(requests, use_tqdm=False)
        assert output.error is None
        alone[adapter.name] = tuple(output.outputs[0].token_ids)
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
    adapters = make_adapters(tmp_path, checkpoint, NUM_ADAPTERS, 0.2)
    options = {"enable_lora": True, "max_loras": NUM_SLOTS, "max_cpu_loras": NUM_COPIES}
    with open_llm(checkpoint, max_num_seqs=8, **options) as llm:
        ended = run_traffic(llm, random.Random(0), adapters, 300, 6)
        check_stats(llm)
        alone = tokens_alone(llm, adapters, 6)
    assert len(set(alone.values())) > 0.9 * len(adapters)
    assert [(name, tokens) for name, tokens in ended if alone[name] != tokens] == []
