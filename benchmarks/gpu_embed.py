"""Embeddings on a GPU against the same model written plainly in torch, with its flash attention.

    python benchmarks/gpu_embed.py MODEL... [--json RESULTS]

A MODEL is a folder with a config.json, of BERT or Qwen3; `bert-base` is that of BERT-base. Weights
are dummies in bfloat16, and torch computes with the same ones. Two things are measured for texts of
512 tokens, medians over the iterations:

- the forward pass alone, launched kernel by kernel and as a CUDA graph
- vectors from token ids: `LLM.embed`, and torch with copies, pooling and normalization

The floor is the FLOPs of the forward pass over 790 TFLOP/s. Every ratio should be at least 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock import LLM
from penstock.runner import device_steps, forward

PEAK = 790e12  # FLOP/s of a large matmul in bfloat16, measured on an H200
LENGTH = 512
STEPS, BATCHES = (1, 8, 16), (1, 8, 64)  # texts
BERT_BASE = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "torch_dtype": "bfloat16",
}  # fmt: skip
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Forward = Callable[[torch.Tensor], torch.Tensor]  # [texts, LENGTH] token ids -> [texts * LENGTH, n]


def torch_bert(model: Any) -> Forward:
    """BERT with Penstock's weights."""
    heads, eps = model.config.num_heads, model.config.norm_eps

    def norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, eps)

    def compute(ids: torch.Tensor) -> torch.Tensor:
        own = model.embeddings
        x = F.embedding(ids, own.word_embeddings.weight)
        x = x + own.position_embeddings.weight[: ids.shape[1]] + own.token_type_embeddings.weight[0]
        x = norm(own.LayerNorm, x)
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = F.linear(x, attention.qkv_proj.weight, attention.qkv_proj.bias)
            split = qkv.view(*ids.shape, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(split[0], split[1], split[2])
            attended = attended.transpose(1, 2).reshape(x.shape)
            y = F.linear(attended, attention.o_proj.weight, attention.o_proj.bias)
            x = norm(layer.post_attention_layernorm, x + y)
            y = F.gelu(F.linear(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias))
            y = F.linear(y, mlp.down_proj.weight, mlp.down_proj.bias)
            x = norm(layer.post_mlp_layernorm, x + y)
        return x.flatten(0, 1)

    return compute


def torch_qwen3(model: Any) -> Forward:
    """Qwen3 with Penstock's weights."""
    inner, config = model.model, model.config
    first = inner.layers[0].self_attn
    heads, kv_heads, size = first.num_heads, first.num_kv_heads, first.head_dim
    device = inner.norm.weight.device
    half = torch.arange(0, size, 2, device=device).float() / size
    angles = torch.outer(
        torch.arange(LENGTH, device=device).float(), config.raw["rope_theta"] ** -half
    )
    dtype = inner.norm.weight.dtype
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1).to(dtype) for f in (torch.cos, torch.sin))

    def norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], layer.weight, layer.eps)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos[: x.shape[2]] + torch.cat([-high, low], dim=-1) * sin[: x.shape[2]]

    def compute(ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, inner.embed_tokens.weight)
        for layer in inner.layers:
            attention = layer.self_attn
            qkv = F.linear(norm(layer.input_layernorm, x), attention.qkv_proj.weight)
            split = qkv.view(*ids.shape, -1, size).split([heads, kv_heads, kv_heads], dim=2)
            query, key = norm(attention.q_norm, split[0]), norm(attention.k_norm, split[1])
            attended = F.scaled_dot_product_attention(
                rotate(query.transpose(1, 2)), rotate(key.transpose(1, 2)),
                split[2].transpose(1, 2), is_causal=True, enable_gqa=True,
            )  # fmt: skip
            attended = attended.transpose(1, 2).flatten(2)
            x = x + F.linear(attended, attention.o_proj.weight)
            gate, up = F.linear(
                norm(layer.post_attention_layernorm, x), layer.mlp.gate_up_proj.weight
            ).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        return norm(inner.norm, x).flatten(0, 1)

    return compute


def count_flops(raw: dict[str, Any], num_texts: int) -> float:
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or hidden // heads
    kv = raw.get("num_key_value_heads", heads)
    is_bert = raw["model_type"] == "bert"
    weights = hidden * head_dim * (2 * heads + 2 * kv)
    weights += (2 if is_bert else 3) * hidden * raw["intermediate_size"]
    attention = (4 if is_bert else 2) * LENGTH * heads * head_dim  # causal: half
    return float(num_texts * LENGTH * raw["num_hidden_layers"] * (2 * weights + attention))


def median_ms(run: Callable[[], object], num_iters: int) -> float:
    """Of calls that follow each other, each timed on its own until the device has finished."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        run()
    times = []
    for _ in range(num_iters):
        sync()
        started = time.perf_counter()
        run()
        sync()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def graph_of(run: Callable[[], torch.Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


class Inputs:
    """Remembers the inputs of the engine's last forward pass."""

    last: forward.ForwardInputs | None = None

    def __enter__(self) -> Inputs:
        self._modules = (device_steps, forward)
        self._own = forward.forward

        def run(model: Any, inputs: forward.ForwardInputs) -> Any:
            self.last = inputs
            return self._own(model, inputs)

        for module in self._modules:
            module.forward = run  # type: ignore[attr-defined]
        return self

    def __exit__(self, *args: object) -> None:
        for module in self._modules:
            module.forward = self._own  # type: ignore[attr-defined]


def texts(num_texts: int, vocab_size: int) -> list[Any]:
    generator = torch.Generator().manual_seed(num_texts)
    ids = torch.randint(10, vocab_size, (num_texts, LENGTH), generator=generator)
    return [{"prompt_token_ids": own} for own in ids.tolist()]


def open_llm(folder: str, **options: Any) -> LLM:
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, runner="pooling",
        max_model_len=LENGTH, enable_prefix_caching=False, log_level="warning",
        kv_cache_memory_bytes=2**33 if torch.cuda.is_available() else 2**28, **options,
    )  # fmt: skip


def model_of(llm: LLM) -> Any:
    return llm.engine.executor.worker.runner.model  # type: ignore[attr-defined]


@torch.inference_mode()
def measure_forward(llm: LLM, plain: Forward, raw: dict[str, Any], num_iters: int) -> list[Any]:
    """`llm` runs without graphs, so that each of its passes can be seen."""
    results = []
    model, has_gpu = model_of(llm), torch.cuda.is_available()
    for num_texts in STEPS:
        prompts = texts(num_texts, raw["vocab_size"])
        with Inputs() as seen:
            llm.embed(prompts, use_tqdm=False)
        inputs = seen.last
        assert inputs is not None
        ids = torch.tensor([own["prompt_token_ids"] for own in prompts])
        ids = ids.to(inputs.token_ids.device)

        def ours(inputs: forward.ForwardInputs = inputs) -> torch.Tensor:
            return forward.forward(model, inputs).states

        def theirs(ids: torch.Tensor = ids) -> torch.Tensor:
            return plain(ids)

        own: dict[str, Any] = {"texts": num_texts, "rows": len(inputs.token_ids)}
        expected, found = theirs().float(), ours()[: num_texts * LENGTH].float()
        own["difference"] = float((found - expected).norm() / expected.norm())
        if own["difference"] > 0.05:
            raise SystemExit(f"the states differ by {own['difference']:.3f}")
        own["floor_ms"] = count_flops(raw, num_texts) / PEAK * 1e3
        own["ours_eager_ms"] = median_ms(ours, num_iters)
        if has_gpu:
            own["ours_graph_ms"] = median_ms(graph_of(ours).replay, num_iters)
        for name, backend in BACKENDS.items() if has_gpu else ():
            with sdpa_kernel([backend]):
                own[f"{name}_eager_ms"] = median_ms(theirs, num_iters)
                own[f"{name}_graph_ms"] = median_ms(graph_of(theirs).replay, num_iters)
        if not has_gpu:
            own["flash_eager_ms"] = median_ms(theirs, num_iters)
        results.append(own)
        print(json.dumps({name: _rounded(value) for name, value in own.items()}), flush=True)
    return results


@torch.inference_mode()
def measure_embed(llm: LLM, plain: Forward, raw: dict[str, Any], num_iters: int) -> list[Any]:
    results = []
    device = next(model_of(llm).parameters()).device
    is_mean = raw["model_type"] == "bert"
    for num_texts in BATCHES:
        prompts = texts(num_texts, raw["vocab_size"])

        def ours(prompts: list[Any] = prompts) -> list[Any]:
            return [out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False)]

        def theirs(prompts: list[Any] = prompts) -> list[Any]:
            ids = torch.tensor([own["prompt_token_ids"] for own in prompts])
            found = []
            for part in ids.to(device).split(16):  # 8,192 tokens
                states = plain(part).view(*part.shape, -1).float()
                pooled = states.mean(1) if is_mean else states[:, -1]
                found.append(F.normalize(pooled, dim=-1))
            return list(torch.cat(found).cpu().numpy())

        own: dict[str, Any] = {"texts": num_texts}
        own["floor_ms"] = count_flops(raw, num_texts) / PEAK * 1e3
        own["embed_ms"] = median_ms(ours, num_iters)
        flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
        with flash if torch.cuda.is_available() else nullcontext():
            own["torch_ms"] = median_ms(theirs, num_iters)
        own["tokens_per_s"] = num_texts * LENGTH / own["embed_ms"] * 1e3
        results.append(own)
        print(json.dumps({name: _rounded(value) for name, value in own.items()}), flush=True)
    return results


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def print_table(name: str, results: dict[str, Any]) -> None:
    for own in results["forward"]:
        ours = min(own[key] for key in ("ours_eager_ms", "ours_graph_ms") if key in own)
        theirs = min(own[key] for key in ("flash_eager_ms", "flash_graph_ms") if key in own)
        print(
            f"{name}, forward of {own['texts']:2} texts: {ours:8.3f} ms, torch with its flash "
            f"{theirs:8.3f} ms: {theirs / ours:5.2f} x; floor {own['floor_ms']:7.3f} ms"
        )
    for own in results["embed"]:
        print(
            f"{name}, embed of   {own['texts']:2} texts: {own['embed_ms']:8.3f} ms, torch "
            f"{own['torch_ms']:8.3f} ms: {own['torch_ms'] / own['embed_ms']:5.2f} x; floor "
            f"{own['floor_ms']:7.3f} ms; {own['tokens_per_s']:,.0f} tokens/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--num-iters", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = name
            if name == "bert-base":
                folder = temporary
                Path(folder, "config.json").write_text(json.dumps(BERT_BASE))
            raw = json.loads(Path(folder, "config.json").read_text())
            make = torch_bert if raw["model_type"] == "bert" else torch_qwen3
            with open_llm(folder, enforce_eager=True) as llm:
                plain = make(model_of(llm))
                own = {"forward": measure_forward(llm, plain, raw, args.num_iters)}
            with open_llm(folder) as llm:
                plain = make(model_of(llm))
                own["embed"] = measure_embed(llm, plain, raw, args.num_iters)
            results[Path(name).name] = own
    for name, own in results.items():
        print_table(name, own)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
