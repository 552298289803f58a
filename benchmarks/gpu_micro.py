"""Kernels one by one on a GPU, against the floor: which configuration is the fastest.

python benchmarks/gpu_micro.py            (on a machine with a GPU)
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
import triton

from penstock.ops.attention import AttentionMetadata
from penstock.ops.triton import attention, pointwise, sampling, tuning
from penstock.ops.triton import linear as few
from penstock.ops.triton.tuning import DecodeTile, FewRowsTile, Launch, PrefillTile


def time_ms(function) -> float:
    return triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median")


def graph_ms(function, repeats: int = 20) -> float:
    """Of one call among many in a captured graph: without launch gaps."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return time_ms(graph.replay) / repeats


def paged(n: int, query: int, seq: int, heads: int, kv_heads: int, dim: int, block: int = 16):
    blocks = -(-seq // block)
    cache = torch.randn(
        n * blocks + 1, 2, block, kv_heads, dim, device="cuda", dtype=torch.bfloat16
    )
    table = (torch.randperm(n * blocks, device="cuda").int() + 1).view(n, blocks)
    starts = torch.arange(0, (n + 1) * query, query, device="cuda", dtype=torch.int32)
    lens = torch.full((n,), seq, device="cuda", dtype=torch.int32)
    decodes = n if query == 1 else 0
    meta = AttentionMetadata(starts, lens, table, lens.long(), decodes, query, seq)
    q = torch.randn(n * query, heads, dim, device="cuda", dtype=torch.bfloat16)
    return q, cache, meta


def decode() -> None:
    print("decode attention: us, TB/s of keys and values")
    for n, seq, heads in ((1, 256, 16), (1, 256, 32), (64, 256, 32), (256, 800, 16), (512, 640, 32), (1, 16384, 32)):
        q, cache, meta = paged(n, 1, seq, heads, 8, 128)
        size = n * seq * 2 * 8 * 128 * 2
        line = []
        default, splits = tuning.decode_tile, tuning.decode_splits
        for tile in (32, 64, 128):
            for warps, stages in ((2, 3), (4, 2), (4, 3), (4, 4), (8, 3)):
                attention.decode_tile = lambda *_, t=tile, w=warps, s=stages: DecodeTile(t, Launch(w, s))
                try:
                    ms = graph_ms(lambda: attention.paged_attention(q, cache, meta, 0.1))
                except Exception as error:
                    line.append((9.9, f"{tile}/{warps}/{stages}: {type(error).__name__}"))
                    continue
                line.append((ms, f"{tile}/{warps}/{stages}: {ms * 1e3:.1f}us {size / ms / 1e9:.2f}"))
        attention.decode_tile = default
        line.sort()
        print(f"  n={n} seq={seq} heads={heads} splits={splits(n, 8)}:", "; ".join(text for _, text in line[:4]), "... worst", line[-1][1])
        line = []
        for count in (1, 2, 4, 8, 16, 32):
            if count * n > 4096:
                continue
            attention.decode_splits = lambda *_, c=count: c
            ms = graph_ms(lambda: attention.paged_attention(q, cache, meta, 0.1))
            line.append(f"{count}: {ms * 1e3:.1f}")
        attention.decode_splits = splits
        print("     splits (default tile):", "; ".join(line))


def prefill() -> None:
    print("prefill attention: ms, TFLOP/s (causal)")
    for n, seq, heads in ((4, 4096, 32), (32, 512, 32), (32, 512, 16)):
        q, cache, meta = paged(n, seq, seq, heads, 8, 128)
        flops = 2 * n * seq * seq * heads * 128
        line = []
        default = tuning.prefill_tile
        for rows in (64, 128):
            for tile in (32, 64, 128):
                for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3)):
                    if rows == 64 and warps == 8:
                        continue
                    attention.prefill_tile = lambda *_, r=rows, t=tile, w=warps, s=stages: PrefillTile(r, t, Launch(w, s))
                    try:
                        ms = time_ms(lambda: attention.paged_attention(q, cache, meta, 0.1))
                    except Exception as error:
                        line.append((99.0, f"{rows}/{tile}/{warps}/{stages}: {type(error).__name__}"))
                        continue
                    line.append((ms, f"{rows}/{tile}/{warps}/{stages}: {ms:.3f}ms {flops / ms / 1e9:.0f}"))
        attention.prefill_tile = default
        line.sort()
        print(f"  n={n} seq={seq} heads={heads}:", "; ".join(text for _, text in line[:5]), "... worst", line[-1][1])
        qb = q.view(n, seq, heads, 128).transpose(1, 2)
        k, v = torch.randn(2, n, 8, seq, 128, device="cuda", dtype=torch.bfloat16)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    ms = time_ms(lambda: F.scaled_dot_product_attention(qb, k, v, is_causal=True, enable_gqa=True))
                print(f"     {backend}: {ms:.3f}ms {flops / ms / 1e9:.0f}")
            except Exception as error:
                print(f"     {backend}: {error!r:.200}")
        try:
            from torch.nn.attention.varlen import varlen_attn
            kk, vv = torch.randn(2, n * seq, heads, 128, device="cuda", dtype=torch.bfloat16)
            starts = meta.query_starts
            ms = time_ms(lambda: varlen_attn(q, kk, vv, starts, starts, seq, seq, is_causal=True))
            print(f"     varlen_attn: {ms:.3f}ms {flops / ms / 1e9:.0f}")
        except Exception as error:
            print(f"     varlen_attn: {error!r:.200}")
        try:
            kk, vv = torch.randn(2, n * seq, 8, 128, device="cuda", dtype=torch.bfloat16)
            starts = meta.query_starts
            def cudnn():
                return torch.ops.aten._cudnn_attention_forward(q, kk, vv, None, starts, starts, seq, seq, False, 0.0, True, False)
            ms = time_ms(cudnn)
            print(f"     cudnn varlen: {ms:.3f}ms {flops / ms / 1e9:.0f}")
        except Exception as error:
            print(f"     cudnn varlen: {error!r:.300}")


def matmuls() -> None:
    print("matmul in a graph, weights rotated: us, TB/s")
    for name, shapes in (("0.6B", ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))), ("8B", ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)))):
        for out, size in shapes:
            count = max(min(int(400e6 // (out * size * 2)) + 1, 60), 2)
            weights = [torch.randn(out, size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            text = []
            for m in (1, 2, 8, 64):
                x = torch.randn(m, size, device="cuda", dtype=torch.bfloat16)
                def chain():
                    for weight in weights:
                        F.linear(x, weight)
                ms = graph_ms(chain, 1) / count
                text.append(f"m={m}: {ms * 1e3:.2f} {out * size * 2 / ms / 1e9:.2f}")
            for m in (1, 4):
                x = torch.randn(m, size, device="cuda", dtype=torch.bfloat16)
                line = []
                for rows in (1, 2, 4, 8):
                    for columns in (512, 1024, 2048):
                        for warps in (2, 4, 8):
                            per = rows * columns // (32 * warps)
                            if not 8 <= per <= (64 if m == 1 else 32):
                                continue
                            few.few_rows_tile = lambda *_, r=rows, c=columns, w=warps: FewRowsTile(r, c, Launch(w, 3))

                            def few_chain():
                                for weight in weights:
                                    few.linear(x, weight, None)
                            ms = graph_ms(few_chain, 1) / count
                            line.append((ms, f"{rows}/{columns}/{warps}: {ms * 1e3:.2f}"))
                line.sort()
                text.append(f"\n      few m={m}: " + "; ".join(t for _, t in line[:5]))
            del weights
            print(f"  {name} {out}x{size}:", "; ".join(text))


def rest() -> None:
    print("pointwise and sampling: us")
    for n, hidden in ((1, 1024), (64, 4096), (512, 4096), (16384, 4096)):
        x, r = torch.randn(2, n, hidden, device="cuda", dtype=torch.bfloat16)
        w = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        g = torch.randn(n, 6 * hidden, device="cuda", dtype=torch.bfloat16)
        norm = graph_ms(lambda: pointwise.add_rms_norm(x, r, w, 1e-6)) * 1e3
        silu = graph_ms(lambda: pointwise.silu_mul(g)) * 1e3
        print(f"  n={n} hidden={hidden}: add_rms_norm {norm:.1f} ({n * hidden * 8 / norm / 1e6:.2f} TB/s) silu_mul {silu:.1f} ({n * hidden * 18 / silu / 1e6:.2f} TB/s)")
    for n in (1, 64, 256, 512):
        logits = torch.randn(n, 151936, device="cuda")
        slots = torch.arange(n, device="cuda")
        floats = torch.tensor([[0.6, -float("inf"), 1.0, 1.0, 0.0, 0.0]] * n, device="cuda")
        ints = torch.tensor([[151936, 7, 0]] * n, device="cuda")
        out = []
        for draws, truncates in ((False, False), (True, False)):
            out.append(graph_ms(lambda: sampling.choose_tokens(logits, slots, slots, floats, ints, draws=draws, truncates=truncates), 3) * 1e3)
        floats[:, 2] = 0.9
        ints[:, 0] = 50
        out.append(graph_ms(lambda: sampling.choose_tokens(logits, slots, slots, floats, ints, draws=True, truncates=True), 1) * 1e3)
        print(f"  sampling {n} rows: greedy {out[0]:.0f}, draw {out[1]:.0f}, top_k+top_p {out[2]:.0f}, torch.max {graph_ms(lambda: logits.max(-1), 3) * 1e3:.0f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    parts = {part.__name__: part for part in (decode, prefill, matmuls, rest)}
    for part in [parts[name] for name in sys.argv[1:]] or parts.values():
        try:
            part()
        except Exception as error:
            print(part.__name__, repr(error)[:500])
