"""What speculative decoding gains on a GPU, with drafters whose acceptance is known.

    python benchmarks/gpu_speculation.py MODEL [--json RESULTS]

MODEL is a folder with a config.json, of a dense decoder such as Qwen3-8B. Weights are dummies. At a
high temperature, the noise of a request chooses its tokens nearly alone. So an engine without
speculation tells in advance what any other will sample, and drafts can be made right or wrong at
will:

- right: always right, for nothing. It shows what verification costs.
- eagle: right with probability 0.7 each. An EAGLE-3 head with random weights and an output
  vocabulary of 32,000 tokens observes and drafts all the same, as the engine runs any head, and its
  drafts are replaced.

Three engines stand side by side and are measured in turn, for as many tokens of each stream. With
eagle, the engine chooses the number of drafts; with right, it is always four. What must hold:

- 1 stream, right: at most 1.0 ms per token
- 1 stream, eagle: at least 1.9 times as fast as without
- 64 streams, eagle: at least 1.4 times
- 256 streams, eagle: at least 0.97 times
- prompts, which a head computes too, eagle: at least 0.95 times
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from penstock import LLM, SamplingParams
from penstock.cli.bench.workloads import Shape, random_workload
from penstock.engine.heap import settled_heap
from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton import ops
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafter, Drafts, DraftStep
from penstock.runner.drafters.eagle3 import Eagle3Drafter

GIB = 2**30
DEVICE = torch.device("cuda")
NUM_DRAFTS, RATE, DRAFT_VOCAB = 4, 0.7, 32_000
PROMPT_LEN = 128
STREAMS = {1: 384, 64: 160, 256: 128}  # streams -> measured tokens of each
NUM_PREFILLED, PREFILL_LEN = 64, 1024  # prompts of which only one token is sampled
WARM_UP = 24  # tokens of each stream before a measurement
TEXT_LEN = PROMPT_LEN + 4 * max(STREAMS.values())
NAMES = ("off", "right", "eagle")


class Line(NamedTuple):
    name: str
    holds: bool


class Known(Drafter):
    """Drafts texts that are known in advance, each token right with probability `rate`."""

    def __init__(self, rate: float, vocab_size: int, num_slots: int) -> None:
        self.num_drafts = NUM_DRAFTS
        self._rate, self._vocab_size = rate, vocab_size
        self._streams: dict[tuple[int, ...], int] = {}  # by prompt
        self._of_slot = torch.zeros(num_slots, dtype=torch.int64, device=DEVICE)
        self._slots = torch.zeros(num_slots, dtype=torch.int64, device=DEVICE)
        shape = (num_slots, TEXT_LEN + NUM_DRAFTS + 1)
        self._texts = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._seen: set[tuple[int, int]] = set()

    def know(self, texts: list[list[int]]) -> None:
        """The texts of the next requests, each with its prompt."""
        self._streams = {tuple(text[:PROMPT_LEN]): row for row, text in enumerate(texts)}
        generator = torch.Generator(DEVICE).manual_seed(0)
        for row, text in enumerate(texts):
            self._texts[row, : len(text)] = torch.tensor(text)
        wrong = torch.rand(self._texts.shape, generator=generator, device=DEVICE) >= self._rate
        self._texts.copy_(torch.where(wrong, (self._texts + 1) % self._vocab_size, self._texts))

    def add(self, slot: int, request: NewRequest) -> None:
        self._of_slot[slot] = self._streams.get(tuple(request.token_ids[:PROMPT_LEN]), 0)

    def propose(self, step: DraftStep) -> Drafts:
        """Replayed from a graph, the second time it comes up."""
        num, count = key = len(step.slots), step.num_drafts
        self._slots[:num].copy_(step.slots)

        def compute() -> torch.Tensor:
            slots = self._slots[:num]
            columns = step.tables.num_tokens[slots][:, None] + torch.arange(count, device=DEVICE)
            columns = columns.clamp(max=self._texts.shape[1] - 1)
            return self._texts[self._of_slot[slots][:, None], columns]

        if key in self._graphs:
            graph, drafts = self._graphs[key]
            graph.replay()
            return Drafts(drafts)
        if key in self._seen:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                drafts = compute()
            self._graphs[key] = graph, drafts
            graph.replay()
            return Drafts(drafts)
        self._seen.add(key)
        return Drafts(compute())


class Replaced(Eagle3Drafter):
    """Computes what an EAGLE-3 head computes, and drafts known texts all the same."""

    def __init__(self, folder: Path, config: dict[str, Any], known: Known) -> None:
        names = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "vocab_size", "torch_dtype",
        )  # fmt: skip
        head = {name: config[name] for name in names if name in config}
        head |= {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
        head |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(head))
        super().__init__(str(folder), NUM_DRAFTS)
        self.known = known

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        self.known.add(slot, request)

    def propose(self, step: DraftStep) -> Drafts:
        super().propose(step)
        return self.known.propose(step)


class Run(NamedTuple):
    ms_per_token: float  # of one stream
    tokens_per_step: float  # of one stream
    texts: list[list[int]]


def run(llm: LLM, num_streams: int, num_tokens: int, num_measured: int) -> Run:
    """Run so many tokens of each stream, and measure the last ones, all streams side by side.

    Streams are withdrawn then: none ends before, and none runs alone.
    """
    prompts = random_workload(Shape(num_streams, PROMPT_LEN, 1), seed=num_streams).prompts
    requests = [
        llm._prepare(
            {"prompt_token_ids": prompt},
            SamplingParams(
                temperature=100.0, seed=index, max_tokens=TEXT_LEN - PROMPT_LEN, ignore_eos=True,
                detokenize=False,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    ids = [request.children[0].request_id for request in requests]
    texts = {name: [*prompt] for name, prompt in zip(ids, prompts, strict=True)}
    engine, total, steps, started = llm.engine, 0, 0, 0.0
    first, last = num_streams * (num_tokens - num_measured), num_streams * num_tokens
    begun = 0
    for request in requests:
        engine.add(request.children[0])
    while total < last:
        deltas = engine.step()
        for delta in deltas:
            assert delta.error is None, delta.error
            texts[delta.request_id] += delta.token_ids
            total += len(delta.token_ids)
        if started and deltas:
            steps += 1
        elif not started and total >= first and total:
            started, begun = time.perf_counter(), total
    seconds = time.perf_counter() - started
    engine.abort(ids)
    while engine.has_work():
        engine.step()
    each = (total - begun) / num_streams
    return Run(seconds / each * 1e3, each / steps, list(texts.values()))


@contextlib.contextmanager
def engines(model: str, config: dict[str, Any]) -> Iterator[dict[str, tuple[LLM, Known | None]]]:
    seqs = max(STREAMS)
    known = {
        "off": None,
        "right": Known(1.0, config["vocab_size"], seqs),
        "eagle": Known(RATE, config["vocab_size"], seqs),
    }
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_num_seqs": seqs, "max_model_len": TEXT_LEN, "kv_cache_memory_bytes": 16 * GIB,
        "log_level": "warning",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = {}
        for name, texts in known.items():
            drafter: Drafter | None = texts
            if name == "eagle" and texts is not None:
                drafter = Replaced(folder, config, texts)
            llm = stack.enter_context(LLM(model, drafter=drafter, **options))
            if name == "eagle":  # as drafters of a configuration are: fewer drafts where they pay
                speculation = llm.engine.scheduler.speculation
                speculation._limits = replace(speculation._limits, adapts_drafts=True)
            found[name] = (llm, texts)
        yield found


def prefill_seconds(llm: LLM, seed: int) -> float:
    prompts = random_workload(Shape(NUM_PREFILLED, PREFILL_LEN, 1), seed).prompts
    once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in prompts], once, use_tqdm=False)
    return time.perf_counter() - started


def measure_prefill(
    all_engines: dict[str, tuple[LLM, Known | None]], num_rounds: int
) -> dict[str, Any]:
    """Milliseconds per 1,000 prompt tokens."""
    seconds: dict[str, list[float]] = {"off": [], "eagle": []}
    for number in range(3 * num_rounds + 1):
        for name, own in seconds.items():
            found = prefill_seconds(all_engines[name][0], number)
            if number:  # the first compiles
                own.append(found)
    results = {}
    for name, own in seconds.items():
        results[f"prefill {name}"] = statistics.median(own) * 1e6 / (NUM_PREFILLED * PREFILL_LEN)
        print(f"prefill, {name:6}", results[f"prefill {name}"], flush=True)
    return results


def measure(model: str, config: dict[str, Any], num_rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with engines(model, config) as all_engines:
        results |= measure_prefill(all_engines, num_rounds)
        for num_streams, num_tokens in STREAMS.items():
            # Drafts reach further than tokens do: streams are not equally fast.
            reach = min(3 * (num_tokens + WARM_UP), TEXT_LEN - PROMPT_LEN - 1)
            texts = run(all_engines["off"][0], num_streams, reach, 1).texts
            names = [*NAMES] if num_streams == 1 else ["off", "eagle"]
            times: dict[str, list[Run]] = {name: [] for name in names}
            for number in range(num_rounds + 1):  # the first captures graphs and learns times
                for name in names:
                    llm, known = all_engines[name]
                    if known is not None and number == 0:
                        known.know(texts)
                    with settled_heap():  # as `LLM` and servers run steps
                        found = run(llm, num_streams, WARM_UP + num_tokens, num_tokens)
                    if number:
                        times[name].append(found)
            for name, own in times.items():
                results[f"{num_streams} {name}"] = {
                    "ms per token": statistics.median(each.ms_per_token for each in own),
                    "tokens per step": statistics.median(each.tokens_per_step for each in own),
                }
                print(f"{num_streams:4} streams, {name:6}", results[f"{num_streams} {name}"],
                      flush=True)  # fmt: skip
    return results


def kernels(config: dict[str, Any]) -> dict[str, float]:
    """Microseconds in a graph: of attention, with one, two and five tokens per request, and of the
    matmuls, with the rows of one token, of a step that verifies, and of 64 such requests."""
    import triton

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, size = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    block_size, found = 16, {}
    layers = {
        "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "o": (heads * head_dim, hidden),
        "gate_up": (hidden, 2 * size),
        "down": (size, hidden),
        "lm_head": (hidden, config["vocab_size"]),
    }
    for name, (inputs, outputs) in layers.items():
        # Several copies, so that none is still in the L2 cache.
        copies = max(2, 2**28 // (inputs * outputs))
        weights = torch.randn(copies, outputs, inputs, dtype=torch.bfloat16, device=DEVICE)
        for rows in (1, 8, 16, 64, 320):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
            found[f"{name}, {rows} rows"] = (
                timed(
                    lambda x=x, w=weights: [ops.linear(x, each, None) for each in w],
                    triton.testing.do_bench,
                )
                / copies
            )
    for requests, length in ((1, 512), (1, 8192), (1, 32768), (64, 512), (64, 4096), (256, 512)):
        num_blocks = length // block_size
        cache = torch.randn(
            requests * num_blocks, 2, block_size, kv_heads, head_dim,
            dtype=torch.bfloat16, device=DEVICE,
        )  # fmt: skip
        table = torch.arange(len(cache), dtype=torch.int32, device=DEVICE).view(requests, -1)
        lens = torch.full((requests,), length, dtype=torch.int32, device=DEVICE)
        arrived = torch.zeros(requests * kv_heads, dtype=torch.int32, device=DEVICE)
        for tokens, width in ((1, 1), (2, 8), (5, 8)):
            query = torch.randn(
                requests * tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE
            )
            starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * tokens
            metadata = AttentionMetadata(
                query_starts=starts, seq_lens=lens, block_table=table, slot_mapping=lens.long(),
                num_decodes=requests, max_query_len=width, max_seq_len=length, arrived=arrived,
                decode_rows=width,
            )  # fmt: skip
            found[f"{requests} x {length}, {tokens} tokens"] = timed(
                lambda q=query, m=metadata, c=cache: ops.paged_attention(q, c, m, head_dim**-0.5),
                triton.testing.do_bench,
            )
    return found


def timed(compute: Callable[[], object], do_bench: Callable[..., Any]) -> float:
    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            compute()
    return float(do_bench(graph.replay, return_mode="median")) * 1e3 / 20


def lines(results: dict[str, Any]) -> list[Line]:
    def ms(name: str) -> float:
        return float(results[name]["ms per token"])

    right = ms("1 right")
    found = [Line(f"1 stream, right: {right:.3f} ms per token, at most 1.0", right <= 1.0)]
    for num, least in ((1, 1.9), (64, 1.4), (256, 0.97)):
        ratio = ms(f"{num} off") / ms(f"{num} eagle")
        name = f"{num} streams, eagle: {ratio:.3f} times as fast, at least {least}"
        found.append(Line(name, ratio >= least))
    ratio = results["prefill off"] / results["prefill eagle"]
    found.append(Line(f"prompts, eagle: {ratio:.3f} times, at least 0.95", ratio >= 0.95))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--num-rounds", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="time single kernels instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = json.loads((Path(args.model) / "config.json").read_text())
    if args.kernels:
        results: dict[str, Any] = kernels(config)
        for name, time_us in results.items():
            print(f"{name:24} {time_us:8.2f} µs")
    else:
        results = measure(args.model, config, args.num_rounds)
        for line in lines(results):
            print(f"{line.name}: {'holds' if line.holds else 'DOES NOT HOLD'}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
