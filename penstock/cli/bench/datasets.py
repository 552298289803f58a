"""Datasets of the server benchmark beside random prompts: shared prefixes and conversations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.cli.bench.prompts import BenchRequest
from penstock.cli.bench.workloads import VOCAB
from penstock.protocol.errors import ConfigError

CHARACTERS_PER_TOKEN = 4  # of English text, where only a text is known and no tokenizer


def _draw(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, VOCAB) for _ in range(length)]


def shared_prefixes(
    count: int, num_prefixes: int, prefix_len: int, suffix_len: int, output_len: int, seed: int
) -> list[BenchRequest]:
    """Prompts that begin with one of a few prefixes, in random order."""
    rng = random.Random(f"prefixes {seed}")
    prefixes = [_draw(rng, prefix_len) for _ in range(num_prefixes)]
    requests = [
        BenchRequest(prefixes[index % num_prefixes] + _draw(rng, suffix_len), output_len)
        for index in range(count)
    ]
    rng.shuffle(requests)
    return requests


def with_prefix(requests: Sequence[BenchRequest], prefix_len: int) -> list[BenchRequest]:
    """The same prompts of token ids, with one prefix for all."""
    prefix = _draw(random.Random("prefix"), prefix_len)
    return [
        replace(request, prompt=prefix + request.prompt)
        for request in requests
        if isinstance(request.prompt, list)
    ]


def random_conversations(
    count: int, num_turns: int, input_len: int, output_len: int, seed: int
) -> list[BenchRequest]:
    """Conversations in which the user says `input_len` random words in each turn."""
    rng = random.Random(f"conversations {seed}")

    def turn() -> str:
        return BenchRequest(_draw(rng, input_len), 1).text()

    return [
        BenchRequest(turn(), output_len, followups=tuple(turn() for _ in range(num_turns - 1)))
        for _ in range(count)
    ]


class _Turn(msgspec.Struct):
    value: str
    sender: str = msgspec.field(name="from", default="")


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: Path, output_len: int | None, only_first: bool) -> list[BenchRequest]:
    """Read a ShareGPT file: a JSON list of objects with `conversations`.

    A request asks for as many tokens as the file's first answer has, estimated from its length, or
    for `output_len`. Conversations that do not begin with a question and an answer are left out.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = msgspec.json.decode(content, type=list[_Conversation])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f'{path} must look like [{{"conversations": [{{"from": "human", "value": "..."}}, '
            f'{{"from": "gpt", "value": "..."}}]}}]: {error}'
        ) from error
    requests = []
    for item in found:
        users = [turn.value for turn in item.conversations[::2]]
        answers = [turn.value for turn in item.conversations[1::2]]
        if not answers or item.conversations[0].sender in ("gpt", "chatgpt", "assistant"):
            continue
        length = output_len or max(len(answers[0]) // CHARACTERS_PER_TOKEN, 1)
        later = () if only_first else tuple(users[1:])
        requests.append(BenchRequest(users[0], length, followups=later))
    if not requests:
        raise ConfigError(f"{path} holds no conversations with a question and an answer")
    return requests
