"""Qwen2.5-VL-7B's shapes on a GPU: the vision tower against its floors, and decode steps.

    python benchmarks/gpu_vision.py [--size 1024] [--parts encoder decode] [--profile] [--tiny]

Weights are dummies in bfloat16.

- encoder: the time of the tower for one image of SIZE x SIZE pixels, against the sum of its matrix
  products (each as one torch call) and of its attention (torch's). It should be within 1.5 x. Small
  images that repeat their size run in a CUDA graph, whose time is beside it.
- decode: the time of a decode step with 1 and 32 requests, whose prompts have an image each,
  against the text model with prompts of the same length. They should be equal.

`--tiny` takes a tiny model on whatever device there is, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from penstock import LLM, SamplingParams
from penstock.models.vision import MediaInputs
from penstock.protocol.media import MediaItem, MediaTensor
from penstock.runner.encoder_graphs import EncoderGraphs
from penstock.runner.graphs import GraphPool
from penstock.text.frontend import PreparedRequest

PATCH, MERGE = 14, 2
NUM_STEPS = 128
IMAGE_TOKEN = 100
TEXT: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
    "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3,
    "hidden_act": "silu",
}  # fmt: skip
TINY_TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TINY_VISION = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}  # fmt: skip


def write_config(folder: Path, tiny: bool, has_tower: bool) -> str:
    text = {**TEXT, **(TINY_TEXT if tiny else {})}
    head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 8, head * 3 // 16, head * 3 // 16]
    if has_tower:
        config: dict[str, Any] = {
            **text,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "vision_config": {**VISION, **(TINY_VISION if tiny else {})},
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
            "image_token_id": IMAGE_TOKEN,
        }
    else:
        config = {**text, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    path = folder / ("vision" if has_tower else "text")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def open_model(folder: str) -> LLM:
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=32,
        max_num_batched_tokens=16384, enable_prefix_caching=False,
    )  # fmt: skip


def median_ms(function: Callable[[], object], count: int = 20) -> float:
    function()
    times = []
    for _ in range(count):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            function()
            times.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times)


def side_of(size: int) -> int:
    """Patches of a side, as Qwen's processor cuts an image."""
    return round(size / (PATCH * MERGE)) * MERGE


def pixels_of(side: int) -> torch.Tensor:
    return torch.randn(side * side, 3 * 2 * PATCH * PATCH)


def encoder(llm: LLM, size: int, profile: bool) -> None:
    model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
    tower, side = model.visual, side_of(size)
    device, dtype = tower.build.device, tower.build.dtype
    pixels = pixels_of(side).to(device, dtype)
    inputs = [MediaInputs("image", {"pixel_values": pixels}, {"grid_thw": [1, side, side]})]
    with torch.inference_mode():
        whole = median_ms(lambda: model.tower.encode(inputs))
        graphs = EncoderGraphs(tower, GraphPool(torch.cuda.is_available()))
        repeated = median_ms(lambda: graphs.encode(inputs))
        products = {name: matmul_ms(*shape, device, dtype) for name, shape in shapes(tower, side)}
        attention = attention_ms(tower, side, device, dtype)
        if profile:
            with torch.profiler.profile() as found:
                model.tower.encode(inputs)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            print(found.key_averages().table(sort_by="self_device_time_total", row_limit=25))
    num_full = len(tower.full)
    num_windowed = len(tower.blocks) - num_full
    floor = sum(products.values()) + num_full * attention[0] + num_windowed * attention[1]
    print(f"image {size} x {size}: {side * side} patches, {side * side // MERGE**2} embeddings")
    for name, ms in products.items():
        print(f"  {name}: {ms:.3f} ms in all layers")
    print(f"  attention: full {attention[0]:.3f} ms x {num_full}, windows {attention[1]:.3f} ms x "
          f"{num_windowed}")  # fmt: skip
    print(f"encoder {whole:.2f} ms, floor {floor:.2f} ms: {whole / floor:.2f} x (at most 1.5)")
    print(f"as the engine runs images of this size again and again: {repeated:.2f} ms")


def shapes(tower: Any, side: int) -> list[tuple[str, tuple[int, int, int, int]]]:
    """The tower's products: rows, in, out, and how often."""
    rows, size, depth = side * side, tower.size, len(tower.blocks)
    inner = tower.raw["intermediate_size"]
    wide = size * MERGE**2
    return [
        ("patches", (rows, 3 * 2 * PATCH * PATCH, size, 1)),
        ("qkv", (rows, size, 3 * size, depth)),
        ("proj", (rows, size, size, depth)),
        ("gate and up", (rows, size, 2 * inner, depth)),
        ("down", (rows, inner, size, depth)),
        ("merger 1", (rows // MERGE**2, wide, wide, 1)),
        ("merger 2", (rows // MERGE**2, wide, tower.raw["out_hidden_size"], 1)),
    ]


def matmul_ms(
    rows: int, inner: int, outer: int, count: int, device: torch.device, dtype: torch.dtype
) -> float:
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(outer, inner, device=device, dtype=dtype)
    return median_ms(lambda: [F.linear(x, weight) for _ in range(count)])


def attention_ms(
    tower: Any, side: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """A layer that attends everywhere, and one that attends in windows."""
    head = tower.size // tower.num_heads

    def time_of(num: int, length: int) -> float:
        q, k, v = (
            torch.randn(num, tower.num_heads, length, head, device=device, dtype=dtype)
            for _ in range(3)
        )
        return median_ms(lambda: F.scaled_dot_product_attention(q, k, v))

    window = (tower.window * MERGE) ** 2
    return time_of(1, side * side), time_of(-(-side * side // window), window)


def image_prompt(llm: LLM, index: int, side: int, path: Path, params: SamplingParams) -> Any:
    """A request whose prompt is 32 tokens, an image and 32 tokens."""
    rows = side * side // MERGE**2
    token_ids = [*range(1, 33), *[IMAGE_TOKEN] * rows, *range(1, 33)]
    prepared = llm.frontend.prepare(f"{index}", token_ids, params)
    item = MediaItem(
        modality="image", hash=f"{path}{index}".encode(), offset=32, length=rows, runs=[(0, rows)],
        path=str(path), facts={"grid_thw": [1, side, side]},
        tensors=[MediaTensor("pixel_values", "float32", (side * side, 3 * 2 * PATCH**2), 0)],
    )  # fmt: skip
    (child,) = prepared.children
    children = [msgspec.structs.replace(child, media=[item])]
    return PreparedRequest(prepared.request_id, children, prepared.assembler)


def decode_ms(llm: LLM, num: int, side: int, path: Path | None) -> float:
    """The time of a step: of those after the first token, the median over runs."""
    times = []
    for run in range(4):
        found = []
        for num_tokens in (1, NUM_STEPS + 1):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            rows = side * side // MERGE**2
            requests = [
                image_prompt(llm, run * 10**6 + num_tokens * 1000 + index, side, path, params)
                if path is not None
                else llm.frontend.prepare(
                    f"{run}-{num_tokens}-{index}", [*range(1, 33)] * (2 + rows // 32), params
                )
                for index in range(num)
            ]
            before = time.perf_counter()
            llm._run(requests, use_tqdm=False)
            found.append(time.perf_counter() - before)
        times.append((found[1] - found[0]) / NUM_STEPS * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--parts", nargs="+", default=["encoder", "decode"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true", help="the tower's kernels by their time")
    args = parser.parse_args()
    side = side_of(args.size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pixels"
        path.write_bytes(pixels_of(side).numpy().tobytes())
        steps: dict[str, dict[int, float]] = {}
        for kind in ("vision", "text"):
            if kind == "text" and "decode" not in args.parts:
                continue
            with open_model(write_config(Path(folder), args.tiny, kind == "vision")) as llm:
                if kind == "vision" and "encoder" in args.parts:
                    encoder(llm, args.size, args.profile)
                if "decode" in args.parts:
                    own = path if kind == "vision" else None
                    steps[kind] = {num: decode_ms(llm, num, side, own) for num in (1, 32)}
            del llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        for num, ms in steps.get("vision", {}).items():
            text = steps["text"][num]
            print(f"decode, {num} requests: {ms:.3f} ms a step, text model {text:.3f} ms: "
                  f"{ms / text:.3f} x (at most 1.02)")  # fmt: skip


if __name__ == "__main__":
    main()
