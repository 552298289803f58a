"""Images on a CPU, with a random model of SmolVLM-256M's sizes in float32.

    python benchmarks/cpu_vision.py --threads 2 --rounds 5

- first token: from a chat with an image of SIDE x SIDE pixels to its first token, the processor
  included, against transformers on the same weights. It should be at least 1.5 times as fast. Every
  image is a new one.
- text: requests without images, against the language model alone, with the same weights: wall and
  CPU time. They should be equal within 2 %.

Both sides of a line run in turn. Prints the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from tiny_vision import VARIANTS, make_vision_checkpoint, picture  # noqa: E402

from penstock import LLM, SamplingParams  # noqa: E402

SIDE, NUM_WORDS, NUM_TOKENS = 512, 60, 32
MAX_MODEL_LEN = 2048
TEXT: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49280,
    "tie_word_embeddings": True,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
}  # fmt: skip
TEXT_PREFIX = "model.text_model."
Timer = Callable[[int], tuple[float, float]]


def make_checkpoint(folder: Path) -> Path:
    variant = VARIANTS["smolvlm"]
    processor = {
        **variant.processor,
        "size": {"longest_edge": 2 * SIDE},
        "max_image_size": {"longest_edge": 512},
    }
    VARIANTS["sized"] = variant._replace(
        text=TEXT, vision=VISION, processor=processor, own={"image_seq_len": 64},
        outer={**variant.outer, "scale_factor": 4},
    )  # fmt: skip
    folder.mkdir()
    return make_vision_checkpoint(folder, "sized")


def make_text_checkpoint(folder: Path, vision: Path) -> Path:
    """The language model of a checkpoint, alone."""
    folder.mkdir()
    config = json.loads((vision / "config.json").read_text())["text_config"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((vision / name).read_bytes())
    tensors = load_file(vision / "model.safetensors")
    own = {
        name.replace(TEXT_PREFIX, "model."): tensor
        for name, tensor in tensors.items()
        if name.startswith(TEXT_PREFIX)
    }
    save_file(own, folder / "model.safetensors")
    return folder


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def chat_of(image: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "What is in this image?"}
    return [{"role": "user", "content": [image, text]}]


def first_token(llm: LLM) -> Timer:
    once = SamplingParams(temperature=0.0, max_tokens=1)

    def run(seed: int) -> tuple[float, float]:
        chat = chat_of({"type": "image_pil", "image_pil": picture(SIDE, SIDE, seed)})
        return timed(lambda: llm.chat(chat, once, use_tqdm=False))

    return run


def first_token_of_transformers(folder: Path, num_threads: int) -> Timer:
    import transformers

    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    from penstock.media.processor import load_processor

    processor = load_processor(str(folder))  # transformers' own, without torchvision

    @torch.inference_mode()
    def generate(image: Any) -> None:
        chat = chat_of({"type": "image"})
        text = processor.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=text, images=[image], return_tensors="pt")
        model.generate(**inputs, max_new_tokens=1, do_sample=False)

    def run(seed: int) -> tuple[float, float]:
        image = picture(SIDE, SIDE, seed)
        torch.set_num_threads(num_threads)  # an engine on the C++ library leaves torch one
        try:
            return timed(lambda: generate(image))
        finally:
            torch.set_num_threads(1)

    return run


def texts(llm: LLM) -> Timer:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def run(seed: int) -> tuple[float, float]:
        prompts = [f"{seed} {index} " + "some words " * NUM_WORDS for index in range(4)]
        return timed(lambda: llm.generate(prompts, params, use_tqdm=False))

    return run


def compare(name: str, ours: Timer, theirs: Timer, rounds: int) -> None:
    for warm_up in (ours, theirs):
        warm_up(0)
    pairs = [(ours(seed), theirs(seed)) for seed in range(1, rounds + 1)]
    # Images are prepared in other processes, whose CPU time is not in ours.
    for kind, index in (("wall", 0), ("CPU", 1))[: 1 if name == "first token" else 2]:
        own, other = (statistics.median(pair[side][index] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[1][index] / pair[0][index] for pair in pairs)
        print(f"{name}, {kind}: {own:.3f} s against {other:.3f} s, {ratio:.3f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "cpu_threads": args.threads, "max_model_len": MAX_MODEL_LEN, "log_level": "warning",
        "kv_cache_memory_bytes": "512MiB", "enable_prefix_caching": False, "dtype": "float32",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        vision = make_checkpoint(Path(folder) / "vision")
        text = make_text_checkpoint(Path(folder) / "text", vision)
        with LLM(str(vision), **options) as llm:
            theirs = first_token_of_transformers(vision, args.threads)
            compare("first token", first_token(llm), theirs, args.rounds)
            with LLM(str(text), **options) as alone:
                compare("text", texts(llm), texts(alone), 3 * args.rounds)


if __name__ == "__main__":
    main()
