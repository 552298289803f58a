"""A model that says what the conversation tells it to: for what no small model does by itself.

The prompt holds ``[[text]]``; the output is what stands between, token for token, and then the end,
or, where that is ``...``, its last dot for ever.
Masks come first: what a grammar or a limit forbids is not said.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from penstock.protocol.step import NewRequest
from penstock.runner.logits_processors import LogitsProcessor, ProcessorRows

ADDED_TOKENS = ("<end>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<other>")
NOT_SPECIAL = ("<think>", "</think>")  # in Qwen's vocabulary neither
# As Qwen's: what the parsers are chosen by is in it, and so is all that a conversation can hold.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}tool {{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for m in messages %}
{%- if m.role == "bad" %}{{ raise_exception("there is no role bad here") }}{% endif %}
{{- m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or "" }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: \
{%- if reasoning_effort %}({{ reasoning_effort }}) {% endif %}
{%- if enable_thinking is true %}<think>{% endif %}
{%- if enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""


def make_scripted_model(folder: Path) -> Path:
    """The tiny model, with the added tokens of a reasoning model that calls tools."""
    from server_process import make_tiny_model  # which engines that load `Script` need not find
    from tokenizers import AddedToken, Tokenizer

    make_tiny_model(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in ADDED_TOKENS:
        is_special = name not in NOT_SPECIAL
        backend.add_tokens([AddedToken(name, special=is_special, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = json.loads((folder / "config.json").read_text())
    shape |= {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


class Script(LogitsProcessor):
    """Reads the script from the prompt's tokens: bytes are tokens in the tiny vocabulary."""

    def __init__(self) -> None:
        self._scripts: dict[int, tuple[int, list[int]]] = {}

    def add(self, slot: int, request: NewRequest) -> bool:
        brackets = [_token("[")] * 2, [_token("]")] * 2
        ids = request.token_ids[: request.num_prompt_tokens]
        begin = max((i for i in range(len(ids)) if ids[i : i + 2] == brackets[0]), default=-1)
        if begin < 0:
            return False
        end = next(i for i in range(begin, len(ids)) if ids[i : i + 2] == brackets[1])
        script = ids[begin + 2 : end]
        if script[-3:] != [_token(".")] * 3:
            script = [*script, 256]
        self._scripts[slot] = (request.num_prompt_tokens, script)
        return True

    def remove(self, slot: int) -> None:
        del self._scripts[slot]

    def apply(self, logits: Tensor, rows: ProcessorRows) -> Tensor:
        for row, slot in enumerate(rows.host_slots.tolist()):
            start, script = self._scripts[slot]
            at = int(rows.positions[row]) - start
            token_id = script[min(at, len(script) - 1)]
            if logits[row, token_id] > float("-inf"):
                logits[row] = float("-inf")
                logits[row, token_id] = 0.0
        return logits


def _token(char: str) -> int:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(char)
