"""Files that come with a model, or that a user hands in, damaged in every way: what cannot be used
is refused with a typed error, in bounded time and memory.

The long form draws a hundred times as many: ``pytest tests/fuzz -m slow``.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from server.server_process import make_tiny_model

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.gguf.file import read_gguf
from penstock.loading.source import resolve_source
from penstock.models.config import DecoderConfig
from penstock.protocol.errors import ConfigError, InputError, ModelError
from penstock.server.batch.files import BadLine, BatchOutput, BatchRequest, parse_line
from penstock.text.renderers.template import ChatTemplate
from penstock.text.templates import load_chat_template
from penstock.text.tokenizer import eos_token_ids, load_tokenizer

FORMS = [
    pytest.param(60, id="short"),
    pytest.param(6000, id="long", marks=pytest.mark.slow),
]
HEADROOM = 2**32  # bytes of address space that refusing a file may take at the very most
LONGEST_S = 60.0  # of CPU time, for one file
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\x00", "a" * 10_000, "llama", "0", [], {}, [[]], [None], [1, 2], ["a"],
    {"": 1}, {"type": "BPE"}, {"content": 3}, [[["a", "b"]]], {"rope_type": "llama3"},
]  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """What happens in here takes neither long nor much memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    started = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - started < LONGEST_S


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value can be changed."""
    found = [path] if path else []
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items[:50]:
        found += places(item, (*path, key))
    return found


def damage(rng: random.Random, value: Any) -> Any:
    """A copy with a few things replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.randrange(1, 4)):
        if not (found := places(value)):
            break
        *parents, key = rng.choice(found)
        inner = value
        for parent in parents:
            inner = inner[parent]
        what = rng.randrange(4)
        if what == 0 and isinstance(inner, (dict, list)):
            del inner[key]
        elif what == 1 and isinstance(inner, dict):
            inner[rng.choice(["type", "vocab", "id", "x", ""])] = copy.deepcopy(rng.choice(JUNK))
        else:
            inner[key] = copy.deepcopy(rng.choice(JUNK))
    return value


def damage_text(rng: random.Random, text: bytes) -> bytes:
    """Bytes changed, cut out, doubled; or nothing of it left."""
    data = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0:
            data[at : at + 1] = rng.randbytes(rng.randrange(4))
        elif what == 1:
            del data[at : at + rng.randrange(1, 200)]
        elif what == 2:
            data[at:at] = data[at : at + 100]
        elif what == 3:
            data[at:at] = rng.choice([b"[" * 3000, b'{"a":' * 3000, b"9" * 6000, b"\xff\xfe"])
        else:
            data = data[:at]
    return bytes(data)


def fuzz_json(
    num_examples: int, seed: str, path: Path, use: Callable[[], object], errors: Any
) -> None:
    """`use` what is at `path`, again and again: it works, or raises one of `errors`."""
    rng = random.Random(seed)
    original = path.read_bytes()
    value = json.loads(original)
    for _ in range(num_examples):
        if rng.random() < 0.7:
            path.write_text(json.dumps(damage(rng, value)))
        else:
            path.write_bytes(damage_text(rng, original))
        with bounded(), suppress(errors):
            use()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


@pytest.mark.parametrize("num_examples", FORMS)
def test_any_config_json_is_read_or_refused(folder: Path, num_examples: int) -> None:
    def use() -> None:
        source = resolve_source(ModelConfig(model=str(folder)), LoadConfig(load_format="dummy"))
        DecoderConfig.from_raw(source.config)
        eos_token_ids(source, None)

    fuzz_json(num_examples, "config", folder / "config.json", use, (ModelError, ConfigError))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("num_examples", FORMS)
def test_any_tokenizer_is_read_or_refused(folder: Path, num_examples: int, name: str) -> None:
    load = LoadConfig(load_format="dummy")
    source = resolve_source(ModelConfig(model=str(folder)), load)

    def use() -> None:
        tokenizer = load_tokenizer(source)
        ids = tokenizer.encode("Some text, with ünïcode.")
        tokenizer.decode(ids)
        eos_token_ids(source, tokenizer)
        template = load_chat_template(source, tokenizer)
        template.render([{"role": "user", "content": "hello"}])

    fuzz_json(num_examples, name, folder / name, use, (ModelError, InputError))


FRAGMENTS = [
    "{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{{ m['content'] }}", "{% if m %}",
    "{% endif %}", "{% else %}", "{% set x = m %}", "{% set ns = namespace(a=1) %}", "{{ x ~ x }}",
    "{{ x * 9999999999 }}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{{ f }}", "{{",
    "}}", "{%", "%}", "{#", "#}", "{{ messages | tojson }}", "{{ messages | map('upper') }}",
    "{{ raise_exception('no') }}", "{% break %}", "{% generation %}", "{% endgeneration %}",
    "{{ ''.join(messages) }}", "{{ range(10**9) | list }}", "{% include 'x' %}", "{{ loop.index }}",
    "{{ self }}", "{{ cycler(1).next() }}", "{{ x.__class__ }}", "{{ strftime_now('%Y') }}", "text",
    "{{ messages | groupby('role') }}", "{{ 1 // 0 }}", "{{ dict(a=1) | xmlattr }}", "\x00",
    "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("num_examples", FORMS)
def test_any_template_renders_or_is_refused(num_examples: int) -> None:
    rng = random.Random(3)
    for _ in range(num_examples):
        text = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 12)))
        with bounded(), suppress(InputError):
            ChatTemplate({"default": text}).render([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("num_examples", FORMS)
def test_any_line_of_a_batch_is_a_request_or_says_what_is_wrong(num_examples: int) -> None:
    rng = random.Random(4)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for _ in range(10 * num_examples):
        if rng.random() < 0.5:
            data = json.dumps(damage(rng, line)).encode()
        else:
            data = damage_text(rng, json.dumps(line).encode())
        with bounded(), suppress(BadLine):
            assert isinstance(parse_line(data), BatchRequest)


@pytest.mark.parametrize("num_examples", FORMS)
def test_any_output_of_an_earlier_batch_is_gone_on_with_or_refused(
    tmp_path: Path, num_examples: int
) -> None:
    rng = random.Random(5)
    answer = {"status_code": 200, "request_id": "r", "body": {"choices": []}}
    result = {"id": "batch_req_1", "custom_id": "a", "response": answer, "error": None}
    lines = b"\n".join([json.dumps(result, separators=(",", ":")).encode()] * 3) + b"\n"
    path = tmp_path / "output.jsonl"
    for _ in range(num_examples):
        path.write_bytes(damage_text(rng, lines))
        with bounded(), suppress(ConfigError), closing(BatchOutput(path)):
            pass


# -- headers that promise more than there is

HUGE = [2**31, 2**40, 2**60, 2**63 - 1, 2**64 - 1]


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize(
    "where", ["tensors", "metadata", "key", "string", "array", "dims", "nested"]
)
def test_a_gguf_header_that_promises_too_much_is_refused_at_once(
    tmp_path: Path, where: str, huge: int
) -> None:
    key = gguf_string(b"general.architecture")
    parts = {
        "tensors": struct.pack("<QQ", huge, 0),
        "metadata": struct.pack("<QQ", 0, huge),
        "key": struct.pack("<QQQ", 0, 1, huge),
        "string": struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, huge),
        "array": struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        "dims": struct.pack("<QQ", 1, 0) + gguf_string(b"t") + struct.pack("<IQQ", 2, huge, huge)
        + struct.pack("<IQ", 0, 0),
        "nested": struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 9, huge),
    }  # fmt: skip
    path = tmp_path / "bomb.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + parts[where] + bytes(64))
    with bounded(), pytest.raises(ModelError, match=r"bomb\.gguf"):
        read_gguf(path)


@pytest.mark.parametrize(
    "header",
    [
        *(struct.pack("<Q", huge) + b"{}" for huge in HUGE),
        *(
            struct.pack("<Q", len(text)) + text
            for text in [
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b'{"t":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,4]}}' % (2**62, 2**62),
                b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,%d]}}' % 2**62,
                b'{"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
                b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
            ]
        ),
    ],
)
def test_a_safetensors_header_that_promises_too_much_is_refused_at_once(
    folder: Path, header: bytes
) -> None:
    (folder / "model.safetensors").write_bytes(header + bytes(4))
    with bounded(), pytest.raises(ModelError, match=r"model\.safetensors"):
        open_checkpoint(resolve_source(ModelConfig(model=str(folder)), LoadConfig()), LoadConfig())


# -- what was found this way


def test_a_line_that_is_not_utf8_fails_alone() -> None:
    with pytest.raises(BadLine, match="not valid JSON"):
        parse_line(b'{"custom\xff": 1}')


@pytest.mark.parametrize("text", ["{% break %}", "{{ " + "(" * 500 + "}}"])
def test_a_template_that_python_refuses_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="the chat template"):
        ChatTemplate({"default": text}).render([{"role": "user", "content": "hello"}])
