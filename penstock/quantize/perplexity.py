"""Measures the perplexity of a text, and observes the inputs of layers meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from penstock.executor.in_process import InProcessExecutor
from penstock.layers.linear import Linear, Product
from penstock.llm import LLM
from penstock.protocol.errors import InputError
from penstock.protocol.sampling import SamplingParams

WINDOW = 512  # tokens predicted from each other
SAMPLE = Path(__file__).with_name("sample.txt")


@dataclass(frozen=True)
class Perplexity:
    logprobs: torch.Tensor  # of every token except each window's first

    @property
    def value(self) -> float:
        return math.exp(-float(self.logprobs.mean()))

    def change(self, before: Perplexity) -> tuple[float, float]:
        """The relative increase over `before`, on the same text, and its standard error."""
        less = before.logprobs - self.logprobs
        return math.expm1(float(less.mean())), float(less.std()) / len(less) ** 0.5


def open_for_windows(model: str, config: Mapping[str, Any]) -> LLM:
    """An engine for windows of a text. `config` is the model's config.json."""
    most = min(WINDOW + 1, config.get("max_position_embeddings") or WINDOW + 1)
    return LLM(model, max_model_len=most, enable_prefix_caching=False, enforce_eager=True)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text {path}: {error}", "text") from error


def windows_of(llm: LLM, text: str, path: Path) -> list[list[int]]:
    tokens = llm.get_tokenizer().encode(text)
    size = llm.engine.limits.max_model_len - 1  # one token is generated after each window
    windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise InputError(f"the text {path} is empty", "text")
    return windows


def measure(llm: LLM, windows: Sequence[list[int]], description: str) -> Perplexity:
    """The perplexity of a text, with a progress bar."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for window in tqdm(windows, desc=description, unit="window", disable=None):
        (output,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        rows = zip(output.prompt_logprobs[1:], window[1:], strict=True)
        found += [row[token].logprob for row, token in rows if row is not None]
    return Perplexity(torch.tensor(found, dtype=torch.float64))


class InputObserver:
    """Sums the squares of a linear layer's inputs. It does not change the output."""

    def __init__(self, layer: Linear) -> None:
        self.moments = torch.zeros(layer.in_features, device=layer.build.device)

    def __call__(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        self.moments += x.float().square().sum(0)
        return product(x)


def observe(llm: LLM, windows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """The second moments of linear layers' inputs over a text, by layer name.

    The parts of a fused layer have its moments. Inputs of experts are not observed.
    """
    executor = llm.engine.executor
    assert isinstance(executor, InProcessExecutor)
    model = executor.runner.model
    assert isinstance(model, torch.nn.Module)
    observers: dict[str, InputObserver] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            layer.adapter = observer = InputObserver(layer)
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{part}" if part else path for part in layer.parts]
            observers |= dict.fromkeys([path, *names], observer)
    measure(llm, windows, "Calibrating")
    return {name: observer.moments.cpu() for name, observer in observers.items()}
