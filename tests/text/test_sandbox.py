"""Templates that would run or grow without end are stopped; all others give what Jinja gives."""

from __future__ import annotations

import time

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import InputError
from penstock.text import sandbox
from penstock.text.chat import ChatTemplate

USER = {"role": "user", "content": "hello"}


def render(text: str, **arguments: object) -> str:
    return ChatTemplate({"default": text}).render([USER], **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(90) }}",
        "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
        "{{ ([[1, 2]] * 900000) | sum(start=[]) }}",
    ],
    ids=["range", "silent-loops", "loops", "macros", "recursion", "sum"],
)
def test_a_template_without_end_is_stopped_in_time(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "TIME_LIMIT_S", 0.3)
    started = time.monotonic()
    with pytest.raises(InputError, match="refuses these messages"):
        render(text)
    assert time.monotonic() - started < 60  # rather than for ever


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10**12 }}",
        "{{ 10**12 * 'x' }}",
        "{{ [1] * 10**12 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ (2 ** 4000) * (2 ** 4000) }}",
        "{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 'x'.center(10**12) }}",
        "{{ 'x' | center(10**12) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**12, 1) }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**12) }}",
        "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
        "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
        "{{ ('x' * 10**5).join('y' * 10**5) }}",
        "{{ ('y' * 10**5) | join('x' * 10**5) }}",
        "{{ 'x' | indent(10**12) }}",
        "{{ '\t'.expandtabs(10**12) }}",
        "{% set x = 'x' * 10**7 %}{% for i in range(20) %}{{ x }}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}"
        "{% set n.x = (n.x, n.x) %}{% set n.y = (n.y, n.y) %}{% endfor %}{{ n.x == n.y }}",
        "{% set n = namespace(x={}) %}{% for i in range(60) %}"
        "{% set n.x = dict(a=n.x, b={'c': n.x}) %}{% endfor %}{{ n.x | tojson }}",
        "{{ ['x' * 10**7] * 10**5 }}",
        "{% set n = namespace(x=['x' * 10**6]) %}{% for i in range(20) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ [1, [2]] | tojson(indent=10**12) }}",
        "{{ range(10**5) | list | tojson(indent=9999) }}",
        "{{ [1, [2]] | tojson(indent='x' * 10**7) }}",
        "{{ range(1000) | list | tojson(separators=('x' * 10**7, ':')) }}",
        "{{ ('{0:>9999}' * 10**5).format('x') }}",
        "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
        "{{ ('%9999d' * 10**5) | format(1) }}",
        "{{ '%(a)99999s' % {'a': 1} }}",
        "{{ '%((a))99999s' % {'(a)': 1} }}",
        "{{ '{0[a}]:>99999}'.format({'a}': 1}) }}",
        "{{ '{0[a}]:]>99999}'.format({'a}': 1}) }}",
        "{{ ('x' * 10**7).translate({120: 'y' * 10**7}) }}",
        "{{ ('\n' * 10**6) | indent(9999, true, true) }}",
        "{{ ('\n' * 10**6) | indent('x' * 9999, true, true) }}",
        "{{ ('\t' * 10**6).expandtabs(9999) }}",
    ],
)
def test_a_template_that_would_fill_the_memory_is_stopped_before(text: str) -> None:
    with pytest.raises(InputError, match="refuses these messages"):
        render(text)


def test_a_list_that_grows_is_not_weighed_anew_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighed: list[int] = []
    weigh = sandbox.LimitedEnvironment._weigh

    def counted(self: sandbox.LimitedEnvironment, value: object) -> int:
        known = id(value) in getattr(self._thread, "weights", {})
        weighed.append(len(value) if isinstance(value, list) and not known else 0)
        return weigh(self, value)

    monkeypatch.setattr(sandbox.LimitedEnvironment, "_weigh", counted)
    text = "{% set n = namespace(x=[]) %}{% for i in range(1000) %}{% set n.x = n.x + [i] %}"
    assert render(text + "{% endfor %}{{ n.x | length }}") == "1000"
    assert sum(weighed) < 5000


def test_an_error_without_words_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(sandbox.LimitedEnvironment, "render_limited", fail)
    with pytest.raises(InputError, match="refuses these messages: MemoryError"):
        render("x")


PIECES = [
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


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4))
def test_limits_change_nothing_about_templates_that_keep_them(pieces: list[str]) -> None:
    text = "".join(pieces)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(text) == environment.from_string(text).render(messages=[USER])
