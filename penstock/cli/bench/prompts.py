"""Selects the prompts of a server benchmark: random, a reference workload, or a file."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.bench.common import DEFAULT_LEN
from penstock.cli.bench.workloads import Length, Shape, Workload, named_workload, random_workload
from penstock.protocol.errors import ConfigError

DEFAULT_NUM_PROMPTS = 100
DEFAULT_NUM_TURNS, DEFAULT_NUM_PREFIXES, DEFAULT_PREFIX_LEN = 4, 10, 256
DATASETS = ("random", "random-mm", "prefix_repetition", "conversations", "sharegpt", "custom")

# Words that replace token ids for servers that take only text: one token each for most models.
_TEXT = (
    "the of and to in is that for it was on are as with they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make "
    "thing see him two has look more day could go come did my sound no most number who over know "
    "water than call first people may down side been now find any new work part take get place"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class BenchRequest:
    """One prompt, as token ids or text, and the number of tokens to generate."""

    prompt: list[int] | str
    output_len: int
    model: str | None = None  # None: the benchmark's
    followups: tuple[str, ...] = ()  # the user's later turns
    history: tuple[str, ...] = ()  # the user's and the model's texts before the prompt, in turn
    media: tuple[dict[str, Any], ...] = ()  # parts of chat completions, before the prompt

    def next_turn(self, answer: str) -> BenchRequest | None:
        """The request that follows the answer to this one, if the conversation goes on."""
        if not self.followups:
            return None
        prompt, *later = self.followups
        history = (*self.history, self.text(), answer)
        return replace(self, prompt=prompt, followups=tuple(later), history=history)

    def text(self) -> str:
        """The prompt as text. Token ids become one word each."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.prompt)


@dataclass(frozen=True)
class PromptSet:
    """The requests to send and their default sampling."""

    name: str
    requests: list[BenchRequest]
    temperature: float
    ignore_eos: bool  # lengths are exact

    @property
    def needs_chat(self) -> bool:
        return any(request.followups or request.media for request in self.requests)

    @staticmethod
    def of_workload(workload: Workload) -> PromptSet:
        pairs = zip(workload.prompts, workload.output_lens, strict=True)
        requests = [BenchRequest(prompt, length) for prompt, length in pairs]
        return PromptSet(workload.name, requests, workload.temperature, ignore_eos=True)


def pick_models(
    requests: Sequence[BenchRequest], models: Sequence[str], seed: int
) -> list[BenchRequest]:
    """Give each request one of the models at random."""
    rng = random.Random(f"models {seed}")
    return [replace(request, model=rng.choice(models)) for request in requests]


def _first(
    requests: Sequence[BenchRequest], count: int, args: argparse.Namespace
) -> list[BenchRequest]:
    """So many requests of a file, which is repeated if it has fewer."""
    if args.no_oversample:
        return list(requests[:count])
    return list(itertools.islice(itertools.cycle(requests), count))


def prompts_from_args(args: argparse.Namespace) -> PromptSet:
    """Read the prompts. Raises `ConfigError` for conflicting flags and empty files."""
    _refuse_others(args)
    if args.workload is not None:
        return PromptSet.of_workload(named_workload(args.workload))
    output_len = args.output_len or DEFAULT_LEN
    count = args.num_prompts or DEFAULT_NUM_PROMPTS
    if args.dataset == "custom":
        requests = read_prompts(_path(args), output_len)
        chosen = _first(requests, args.num_prompts or len(requests), args)
        return PromptSet(args.dataset_path.name, chosen, temperature=0.0, ignore_eos=False)
    if args.dataset == "sharegpt" or (args.dataset == "conversations" and args.dataset_path):
        from penstock.cli.bench.datasets import read_sharegpt

        conversations = read_sharegpt(
            _path(args), args.output_len, only_first=args.dataset == "sharegpt"
        )
        if not args.disable_shuffle:
            random.Random(f"sharegpt {args.seed}").shuffle(conversations)
        chosen = _first(conversations, count, args)
        return PromptSet(args.dataset_path.name, chosen, temperature=0.0, ignore_eos=False)
    if args.dataset == "conversations":
        from penstock.cli.bench.datasets import random_conversations

        requests = random_conversations(
            count,
            args.num_turns or DEFAULT_NUM_TURNS,
            args.input_len or DEFAULT_LEN,
            output_len,
            args.seed,
        )
        return PromptSet("conversations", requests, temperature=0.0, ignore_eos=True)
    if args.dataset == "prefix_repetition":
        from penstock.cli.bench.datasets import shared_prefixes

        requests = shared_prefixes(
            count,
            args.prefix_repetition_num_prefixes or DEFAULT_NUM_PREFIXES,
            args.prefix_repetition_prefix_len or DEFAULT_PREFIX_LEN,
            args.prefix_repetition_suffix_len or DEFAULT_PREFIX_LEN,
            output_len,
            args.seed,
        )
        return PromptSet("prefix_repetition", requests, temperature=0.0, ignore_eos=True)
    ratio = args.range_ratio or 0.0
    shape = Shape(
        num_requests=count,
        input_len=_around(args.input_len or DEFAULT_LEN, ratio),
        output_len=_around(output_len, ratio),
    )
    prompts = PromptSet.of_workload(random_workload(shape, seed=args.seed))
    if args.dataset == "random-mm":
        from penstock.cli.bench.random_media import mix_of, with_media

        requests = with_media(prompts.requests, mix_of(args), args.seed)
        return replace(prompts, name="random-mm", requests=requests)
    if args.random_prefix_len:
        from penstock.cli.bench.datasets import with_prefix

        return replace(prompts, requests=with_prefix(prompts.requests, args.random_prefix_len))
    return prompts


def _path(args: argparse.Namespace) -> Path:
    if args.dataset_path is None:
        raise ConfigError(f"dataset {args.dataset} needs a file: give --dataset-path")
    path: Path = args.dataset_path
    return path


# The flags that only some datasets read.
_FLAGS_OF = {
    "random": {"input_len", "range_ratio", "random_prefix_len"},
    "random-mm": {
        "input_len",
        "range_ratio",
        "random_mm_base_items_per_request",
        "random_mm_num_mm_items_range_ratio",
        "random_mm_limit_mm_per_prompt",
        "random_mm_bucket_config",
    },
    "prefix_repetition": {
        "prefix_repetition_prefix_len",
        "prefix_repetition_suffix_len",
        "prefix_repetition_num_prefixes",
    },
    "conversations": {"input_len", "num_turns", "dataset_path"},
    "sharegpt": {"dataset_path"},
    "custom": {"dataset_path"},
}


def _refuse_others(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that would have no effect."""
    names = set().union(*_FLAGS_OF.values())
    if args.workload is not None:
        what, names = f"workload {args.workload}", {*names, "num_prompts", "output_len", "dataset"}
    else:
        dataset = args.dataset or "random"
        what, names = f"dataset {dataset}", names - _FLAGS_OF[dataset]
        if dataset == "conversations" and args.dataset_path is not None:
            names |= {"input_len", "num_turns"}
    if extra := sorted(name for name in names if getattr(args, name) is not None):
        raise ConfigError(f"{what} fixes this already: drop {', '.join(extra)}")


def _around(length: int, ratio: float) -> Length:
    if ratio == 0:
        return length
    return max(round(length * (1 - ratio)), 1), round(length * (1 + ratio))


class _Line(msgspec.Struct):
    prompt: str | list[int]
    output_len: int | None = None


def read_prompts(path: Path, default_output_len: int) -> list[BenchRequest]:
    """Read one JSON object per line: ``prompt`` (text or token ids), optional ``output_len``."""
    requests = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f'line {number} of {path} must look like {{"prompt": "...", "output_len": 64}}: '
                f"{error}"
            ) from error
        length = default_output_len if item.output_len is None else item.output_len
        if length < 1:
            raise ConfigError(f"line {number} of {path}: output_len must be at least 1")
        requests.append(BenchRequest(item.prompt, length))
    if not requests:
        raise ConfigError(f"{path} holds no prompts")
    return requests
