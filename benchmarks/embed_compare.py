"""Embeddings on a CPU beside sentence-transformers and ONNX Runtime: speed, and whether they agree.

    python benchmarks/embed_compare.py MODEL --sentences sts-test.csv --others-python PYTHON

MODEL is a folder with sentence-transformers' files and a BERT. PYTHON is an interpreter that has
sentence-transformers, onnx and onnxruntime; without it, Penstock runs alone. Each engine is a
process of its own that loads once. They take turns, one run each a round, and a ratio is the median
of the rounds' ratios: whatever else the machine does then hits all of them alike.

The CSV is that of the STS benchmark: tab-separated, a score in column 5, sentences in 6 and 7.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONG_TOKENS = 256
BATCH = 32
SERVE = "--serve"


# -- the engines, each in a process of its own


class Penstock:
    def __init__(self, model: str, threads: int, **options: Any) -> None:
        from penstock import LLM

        self.llm = LLM(model, cpu_threads=threads, log_level="error", **options)

    def embed(self, texts: list[str]) -> Any:
        import numpy as np

        outputs = self.llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)
        return np.stack([output.outputs.embedding for output in outputs])


class SentenceTransformers:
    def __init__(self, model: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self.model = SentenceTransformer(model, device="cpu")

    def embed(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=BATCH)


class OnnxRuntime:
    """An export of the encoder, in batches of texts of like length, as sentence-transformers has
    them; pooled and normalized by numpy."""

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModel

        encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
        encoder.requires_grad_(False)
        names = ["input_ids", "attention_mask", "token_type_ids"]

        class Export(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder = encoder

            def forward(self, ids: Any, mask: Any, types: Any) -> Any:
                bias = (1.0 - mask[:, None, None, :].float()) * -1e9
                return self.encoder(
                    input_ids=ids, attention_mask=bias, token_type_ids=types
                ).last_hidden_state

        sample = torch.ones(2, 8, dtype=torch.long)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.onnx")
            axes = {name: {0: "batch", 1: "length"} for name in names}
            torch.onnx.export(
                Export(), (sample, sample, torch.zeros_like(sample)), path, input_names=names,
                output_names=["states"], dynamic_axes={**axes, "states": {0: "batch", 1: "length"}},
                dynamo=False,
            )  # fmt: skip
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            self.session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        self.tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONG_TOKENS)
        self.tokenizer.no_padding()

    def embed(self, texts: list[str]) -> Any:
        import numpy as np

        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        vectors: list[Any] = [None] * len(ids)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            shape = (len(batch), len(ids[batch[0]]))
            tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
            for row, index in enumerate(batch):
                tokens[row, : len(ids[index])] = ids[index]
                mask[row, : len(ids[index])] = 1
            feed = {
                "input_ids": tokens,
                "attention_mask": mask,
                "token_type_ids": np.zeros_like(mask),
            }
            (states,) = self.session.run(None, feed)
            sums = (states * mask[:, :, None]).sum(1)
            pooled = sums / mask.sum(1, keepdims=True)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for row, index in enumerate(batch):
                vectors[index] = pooled[row]
        return np.stack(vectors)


ENGINES = {
    "penstock": Penstock,
    "penstock int8": lambda model, threads: Penstock(model, threads, quantization="int8"),
    "sentence-transformers": SentenceTransformers,
    "onnxruntime": OnnxRuntime,
}


def serve(name: str, model: str, threads: int) -> None:
    """Answer lines of texts with the seconds they took, and vectors in a file where asked to."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    engine = ENGINES[name](model, threads)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        wall, used = time.perf_counter(), time.process_time()
        vectors = engine.embed(order["texts"])
        seconds = [time.perf_counter() - wall, time.process_time() - used]
        if order["save"]:
            import numpy as np

            np.save(order["save"], vectors)
        print(json.dumps(seconds), file=replies, flush=True)


class Engine:
    def __init__(self, python: str, name: str, model: str, threads: int) -> None:
        self.process = subprocess.Popen(
            [python, __file__, model, SERVE, name, "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reply()

    def run(self, texts: list[str], save: str = "") -> tuple[float, float]:
        """Wall-clock and processor seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"texts": texts, "save": save}) + "\n")
        self.process.stdin.flush()
        wall, used = self._reply()
        return wall, used

    def _reply(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended before it answered")
        return json.loads(line)


# -- the comparison


def read_sentences(path: Path, limit: int | None) -> tuple[list[str], list[float]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    return [text for row in rows for text in row[5:7]], [float(row[4]) for row in rows]


def long_texts(sentences: list[str], count: int) -> list[str]:
    """Texts that are certainly cut at LONG_TOKENS."""
    words = " ".join(sentences).split()
    starts = [index * (len(words) - LONG_TOKENS) // max(count - 1, 1) for index in range(count)]
    return [" ".join(words[start : start + LONG_TOKENS]) for start in starts]


def spearman(vectors: Any, scores: list[float]) -> float:
    """The correlation of ranks; equal scores share theirs."""
    import numpy as np

    def ranks(values: Any) -> Any:
        _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(sizes) - (sizes + 1) / 2)[group]

    cosines = (vectors[0::2] * vectors[1::2]).sum(1)
    return float(np.corrcoef(ranks(cosines), ranks(np.array(scores)))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sentences", type=Path)
    parser.add_argument("--others-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-long", type=int, default=64)
    parser.add_argument("--limit", type=int, help="Use so many pairs of sentences, not all.")
    parser.add_argument(SERVE, choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.model, args.threads)
        return
    if args.sentences is None:
        parser.error("--sentences is needed")
    import numpy as np

    names = [name for name in ENGINES if args.others_python or name.startswith("penstock")]
    engines = {}
    for name in names:
        python = sys.executable if name.startswith("penstock") else args.others_python
        engines[name] = Engine(python, name, args.model, args.threads)
    sentences, scores = read_sentences(args.sentences, args.limit)
    reference = "sentence-transformers" if args.others_python else "penstock"

    with tempfile.TemporaryDirectory() as folder:
        vectors = {}
        for name, engine in engines.items():
            path = str(Path(folder) / f"{names.index(name)}.npy")
            engine.run(sentences, path)
            vectors[name] = np.load(path)
    print(f"| engine | largest difference to {reference} | Spearman |\n|---|---|---|")
    for name in names:
        difference = np.abs(vectors[name] - vectors[reference]).max()
        print(f"| {name} | {difference:.1e} | {spearman(vectors[name], scores):.4f} |")

    workloads = {
        "sentences": sentences,
        f"{LONG_TOKENS} tokens": long_texts(sentences, args.num_long),
    }
    for workload, texts in workloads.items():
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(args.rounds + 1):
            for name in names:
                taken[name].append(engines[name].run(texts))
        print(f"\n{workload}: {len(texts)} texts, {args.rounds} rounds\n")
        print(f"| engine | texts/s | to {reference} | processor ms/text |\n|---|---|---|---|")
        for name in names:
            rounds = taken[name][1:]  # the first warms up
            rate = statistics.median(len(texts) / wall for wall, _ in rounds)
            ratios = [
                other / own
                for (own, _), (other, _) in zip(rounds, taken[reference][1:], strict=True)
            ]
            used = statistics.median(cpu for _, cpu in rounds) * 1000 / len(texts)
            print(f"| {name} | {rate:.0f} | {statistics.median(ratios):.2f} | {used:.2f} |")


if __name__ == "__main__":
    main()
