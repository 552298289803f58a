"""Templates and texts that would run or grow without end cost their sender an error."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from threading import Semaphore, Thread
from typing import Any

import pytest
from tiny_tokenizers import byte_level_backend

from penstock.confined.errors import PoolClosed
from penstock.confined.scope import JobScope, NeedsTurn
from penstock.protocol.errors import InputError
from penstock.server.service import NUM_WAITING_THREADS
from penstock.text.pieces import MAX_PIECE_LENGTH
from penstock.text.renderers.template import ChatTemplate
from penstock.text.text_pool import LIMITS, TextPool
from penstock.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), {"bos_token": "<s>"})


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> Iterator[TextPool]:
    made = TextPool(tokenizer, replace(LIMITS, cpu_s=0.5, num_workers=2))
    yield made
    made.close()


@pytest.mark.parametrize(
    "text",
    [
        ENDLESS,
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(90) }}",
        "{{ ([[1, 2]] * 900000) | sum(start=[]) }}",
        "{{ 'x' * 10**12 }}",
        "{{ 10 ** 10000000000 }}",
        "{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 'x'.center(10**12) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:{}}'.format(1, 10**12) }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{{ ('a ' * 10**6) | wordwrap(1) }}",
    ],
)
def test_a_template_without_end_costs_its_sender_an_error(pool: TextPool, text: str) -> None:
    with pytest.raises(InputError, match="template"):
        pool.render(text, [USER], {})
    assert pool.render("{{ messages[0].content }}", [USER], {}) == "hello"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{% if %}", "the chat template is broken at line 1"),
        ("{{ raise_exception('no') }}", "the chat template refuses these messages: no"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(pool: TextPool, text: str, error: str) -> None:
    with pytest.raises(InputError, match=error) as caught:
        pool.render(text, [USER], {})
    assert caught.value.field == "messages"


TEMPLATES = [
    "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m, (m.role, 1)] %}"
    "{% endfor %}{{ n.l }}{{ {'a': n.l, 'b': [[1], ()]} }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ 'call 123456789: {}'.format('x') }}{{ '%s since 1700000000' | format('y') }}{{ '%(a)3s' % "
    "{'a': 123456} }}{{ '{:*^9}{{10000}}{x}'.format('x', x=[1]) }}{{ '5 %% (12345) %s' % 'x' }}",
    "{{ ('a' ~ 'b') in ['ab', 'c'] }}{{ {'a': 1}.items() | list }}{{ 'x\ny' | indent(2) }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role ~ ': ' ~ m['content'] }}"
    "{% if not loop.last %}, {% endif %}{{ loop.previtem | default('-') }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ k ~ v }}{% endfor %}",
    "{% for k in {'a': 1} %}{{ k }}{% else %}none{% endfor %}",
    "{% for i in range(5) if i % 2 %}{{ i * 2 + i ** 2 }}{% endfor %}",
    "{% for c in 'abc' | reverse %}{{ c }}{% endfor %}{% for i in [] %}{% else %}empty{% endfor %}",
    "{% for t in [[1, [2, [3]]]] recursive %}{{ t if t is number else loop(t) }}{% endfor %}",
    "{{ 'a,b'.split(',') | join('-') }}{{ [{'x': 1}, {'x': 2}] | join('+', attribute='x') }}",
    "{{ 'ab' | replace('a', 'c') }}{{ 'aaa'.replace('a', 'b', 1) }}{{ 'x' | indent(2, true) }}",
    "{{ '%s: %05.1f' % ('a', 1.25) }}{{ '%s' | format('b') }}{{ '{} {{}} {:>4}'.format(1, 2) }}",
    "{% set n = namespace(i=0) %}{% for i in [1, 2] %}{% set n.i = n.i + i %}{% endfor %}{{ n.i }}",
    "{% macro f(x, y='d') %}{{ x ~ y ~ caller() }}{% endmacro %}{% call f('a') %}in{% endcall %}",
    "{{ ('x' ~ ('y' ~ 1)) ~ [1 ~ 2] ~ nothing }}{{ messages | map(attribute='role') | list }}",
    "{{ 'abc'[1:] }}{{ -7 // 2 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ (1,) + (2,) }}{{ 'x' * 3 }}",
    "{{ ', '.join(['a', 'b']) }}{{ 'x'.center(5) }}{{ 'x' | center(5) }}{{ 'a b' | truncate(3) }}",
]


def test_templates_give_what_they_give_in_this_process(pool: TextPool) -> None:
    messages = [USER, {"role": "assistant", "content": "é 😀 <b>"}]
    options: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}], "x": 1}
    for text in [*TEMPLATES, "{{ bos_token }}{{ tools | tojson }}{{ x }}{{ messages[1].content }}"]:
        here = ChatTemplate({"default": text}, {"bos_token": "<s>"}).render(messages, **options)
        assert pool.render(text, messages, options) == here


def test_pieces_of_text_have_the_tokens_that_they_have_in_this_process(
    pool: TextPool, tokenizer: Tokenizer
) -> None:
    text = "the cat sat é 😀\n" * 20_000
    assert tokenizer.encode(text, encode_piece=pool.encode_piece) == tokenizer.encode(text)
    assert pool.encode_piece("the cat", True) == tokenizer.encode_piece("the cat", True)


def test_a_stretch_that_cannot_be_cut_is_bounded(pool: TextPool, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=f"a stretch of more than {MAX_PIECE_LENGTH} characters"):
        tokenizer.encode(" " * 2**23, encode_piece=pool.encode_piece)
    hurried = TextPool(tokenizer, replace(LIMITS, cpu_s=0.01))
    with pytest.raises(InputError, match=f"a stretch of {MAX_PIECE_LENGTH} characters that takes"):
        hurried.encode_piece(" " * MAX_PIECE_LENGTH)
    hurried.close()


def test_work_that_waits_gives_its_slot_away_and_ends_when_its_client_leaves(
    tokenizer: Tokenizer,
) -> None:
    pool = TextPool(tokenizer, replace(LIMITS, cpu_s=600.0, num_workers=2, quantum_s=0.05))
    slots = Semaphore(1)
    outcomes: list[BaseException] = []

    def wait_for_endless_template(scope: JobScope) -> None:
        try:
            scope.run(pool.render, ENDLESS, [USER], {})
        except (CancelledError, PoolClosed) as error:
            outcomes.append(error)

    scopes = [JobScope("tenant", slots) for _ in range(3)]
    threads = [Thread(target=wait_for_endless_template, args=(scope,)) for scope in scopes]
    for thread in threads:
        thread.start()
    other = JobScope("other", slots)
    assert other.run(pool.render, "fine", [USER], {}) == "fine"
    for scope in scopes:
        scope.cancel()
    for thread in threads:
        thread.join()
    assert [type(outcome) for outcome in outcomes] == [CancelledError] * 3
    assert other.run(pool.render, "fine", [USER], {}) == "fine"
    assert slots.acquire(blocking=False)  # all are back
    pool.close()


def test_long_texts_and_templates_need_a_turn(pool: TextPool) -> None:
    without = JobScope("a", has_turn=False)
    with pytest.raises(NeedsTurn):
        without.run(pool.encode_piece, "hello")
    with pytest.raises(NeedsTurn):
        without.run(pool.render, "hello", [USER], {})
    assert JobScope("a").run(pool.render, "hello", [USER], {}) == "hello"


def test_each_thread_that_may_wait_has_a_place_in_the_queue() -> None:
    """So no burst of long texts is refused."""
    assert LIMITS.max_queued >= NUM_WAITING_THREADS
