"""Each thing a chat template can reach has a bound: nothing is forgotten, no number grows, long texts still work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from jinja2.tests import TESTS as DEFAULT_TESTS

from holdfast.errors import RequestError
from holdfast.text.templates import budget as template_budget
from holdfast.text.templates import string_slices, template
from holdfast.text.templates.budget import Budget, SlowRenderingError, impatient
from holdfast.text.templates.compiler import NODES, REFUSED_NODES
from holdfast.text.templates.filters import FILTERS, REMOVED_FILTERS, REPLACED_FILTERS, TESTS
from holdfast.text.templates.methods import METHODS, PARTS, REFUSED_METHODS
from holdfast.text.templates.sandbox import GLOBALS, REMOVED_GLOBALS
from holdfast.text.templates.template import ChatTemplate, compile_template

QUICK = ChatTemplate("quick")
ABSTRACT_NODES = {"Node", "Stmt", "Helper", "Expr", "BinExpr", "UnaryExpr", "Literal", "_FilterTestCommon"}


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}], variables=variables)


def refusal(source: str, **variables: Any) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, **variables)
    return caught.value.code


# ---- nothing is forgotten: a new version of Jinja or Python that adds something fails here until it has a bound


def test_every_filter_has_a_bound_or_is_removed() -> None:
    assert FILTERS.keys() | REMOVED_FILTERS | REPLACED_FILTERS == DEFAULT_FILTERS.keys()
    assert not FILTERS.keys() & (REMOVED_FILTERS | REPLACED_FILTERS)
    # What is there is what has a bound, and two that the compiler puts around loops and arguments.
    assert template._ENVIRONMENT.filters.keys() == FILTERS.keys() | REPLACED_FILTERS | {"_counted", "_spread"}


def test_every_test_and_global_has_a_bound() -> None:
    assert TESTS == DEFAULT_TESTS.keys() == template._ENVIRONMENT.tests.keys()
    assert DEFAULT_NAMESPACE.keys() == GLOBALS | REMOVED_GLOBALS
    assert template._ENVIRONMENT.globals.keys() == GLOBALS | {"raise_exception", "strftime_now"}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_attribute_of_a_value_has_a_bound_or_is_refused(kind: type) -> None:
    known = METHODS[kind].keys() | PARTS.get(kind, frozenset()) | REFUSED_METHODS[kind]
    assert {name for name in dir(kind) if not name.startswith("_")} <= known
    assert not METHODS[kind].keys() & REFUSED_METHODS[kind]


def test_every_kind_of_node_is_allowed_or_refused() -> None:
    made = {name for name, kind in vars(nodes).items() if isinstance(kind, type) and issubclass(kind, nodes.Node)}
    assert made - ABSTRACT_NODES == NODES | REFUSED_NODES
    assert not NODES & REFUSED_NODES


@pytest.mark.parametrize("source", [
    "{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}",
    "{% autoescape true %}{% endautoescape %}", "{{ 'a'.encode() }}", "{{ 'a'.translate({}) }}",
    "{{ (1).to_bytes(2, 'big') }}", "{{ {}.fromkeys('a') }}", "{{ (messages | map('upper')).send(1) }}",
    "{{ {}.keys().mapping }}{{ {}.keys().mapping.x }}", "{{ dict.fromkeys('a') }}", "{{ {'a': 1}.keys() - ['a'] }}",
    "{{ dict.mro() }}", "{{ ''.join.__self__ }}{{ ''.join.__self__.x }}",
])  # fmt: skip
def test_what_has_no_bound_is_refused(source: str) -> None:
    assert refusal(source) == "HF302"


# ---- no number grows


@pytest.mark.parametrize("source", [
    "{{ 0x" + "f" * 1200 + " }}", "{{ " + "9" * 1290 + " }}", "{{ " + "9" * 150_000 + " }}",
    "{{ 1." + "1" * 150_000 + " }}", "{{ '%d' | format(n) * 20000 }}",
    "{{ n * n }}", "{{ n * 2 }}", "{{ n + n }}", "{{ n - (-n) }}", "{{ -n - n }}", "{{ 2 ** 4097 }}", "{{ n ** 2 }}",
    "{{ [n, n] | sum }}", "{{ ('f' * 1200) | int(0, 16) }}", "{{ ('z' * 999) | int(0, 36) }}", "{{ 7 | round(5000) }}",
    "{{ 7 | round(-5000) }}", "{{ ('9' * 5000) | float }}", "{{ ('9' * 5000) | int }}",
])  # fmt: skip
def test_no_number_grows_beyond_its_bits(source: str) -> None:
    assert refusal(source, n=2**4096 - 1) == "HF302"


@pytest.mark.parametrize(("source", "expected"), [
    ("{{ n // 3 }}", (2**4096 - 1) // 3), ("{{ n % 7 }}", (2**4096 - 1) % 7), ("{{ n - 1 }}", 2**4096 - 2),
    ("{{ -n }}", 1 - 2**4096), ("{{ -n | abs }}", 2**4096 - 1), ("{{ '%d' % n }}", 2**4096 - 1),
])  # fmt: skip
def test_large_numbers_that_were_given_can_be_used(source: str, expected: int) -> None:
    assert render(source, n=2**4096 - 1) == str(expected)


@pytest.mark.parametrize("place", ["messages", "tools", "chat_template_kwargs"])
def test_numbers_that_come_as_json_are_bounded(place: str) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    large = {"n": [2**4096]}
    if place == "messages":
        given["messages"][0]["extra"] = large
    else:
        given["tools" if place == "tools" else "variables"] = [large] if place == "tools" else large
    with pytest.raises(RequestError, match="4097 bits") as caught:
        ChatTemplate("x").render(given.pop("messages"), **given)
    assert caught.value.field == place


@pytest.mark.parametrize(
    "source", ["{{ '%1000000000d' is odd }}", "{{ '%s' is divisibleby('x') }}", "{{ '%c' is even }}"]
)
def test_tests_of_numbers_format_no_text(source: str) -> None:
    assert refusal(source) == "HF301"


# ---- what was quadratic, or took seconds in one piece


@pytest.mark.parametrize("source", [
    "{{ ('a' * 900000).rfind('a' * 50000 + 'b' + 'a' * 50000) }}",
    "{{ ('a' * 400000).rsplit('a' * 5000 + 'b' + 'a' * 5000) }}",
    "{{ ('a' * 900000).strip('b' * 900000 + 'a') }}",
    "{{ ('ab ' * 300000) | title }}", "{{ ('ab ' * 300000) | wordcount }}", "{{ ('ß' * 900000).upper() }}",
    "{{ ('ß' * 900000) | upper }}", "{{ ('\n' * 900000).splitlines() }}", "{{ ('é' * 900000) | list | length }}",
    "{{ ([3, 1] * 400000) | sort | length }}", "{{ ([[1, 2], [3]] * 40000) | string }}", "{{ [1] * 900000 }}",
    "{{ ('a' * 900000) | urlencode }}", "{{ '{0:>9}' * 9999 }}{{ (':' * 20000).format() }}", "{{ ('%' * 20000) % () }}",
    "{{ ['x'] | map(attribute='a.' * 5000) | list }}", "{{ ['x'] | map(default=1, attribute='a.' * 5000) | list }}",
    "{{ ('%r' % long) }}", "{{ '{!r}'.format(long) }}", "{{ '%(x)-9a' % {'x': long} }}",
    "{{ dict(*('a' * 900000)) }}", "{{ f(*('a' * 900000)) }}", "{{ ([1] * 900000) | batch(20000) | list }}",
    "{{ {'a': ([1] * 300000)}.values() | string }}", "{{ [1] * 900000 == [1] * 900000 }}",
])  # fmt: skip
def test_what_would_take_long_in_one_piece_is_refused(source: str) -> None:
    assert refusal("{% macro f() %}{% endmacro %}" + source, long="é" * 1_500_000) == "HF302"


def test_values_are_not_nested_without_end() -> None:
    """Python hashes tuples by recursion in C, which no limit of its own stops."""
    deeper = "{% macro f() %}{% set ns.t = varargs %}{% endmacro %}{% for i in range(300) %}{{ f(ns.t) }}{% endfor %}"
    for use in (
        "{{ {ns.t: 1} }}",
        "{{ ns.t in {} }}",
        "{{ {}[ns.t] }}",
        "{{ {}.get(ns.t) }}",
        "{{ [ns.t] | unique | list }}",
    ):
        assert refusal("{% set ns = namespace(t=()) %}" + deeper + use) == "HF302", use


@pytest.mark.parametrize("source", [
    "{{ a" + ".b" * 40_000 + " }}", "{{ " + "(" * 50_000, "{{ " + "not " * 40_000 + "a }}", "{{" * 90_000,
    "{{ [" + "1," * 80_000 + "] }}", "{% if a %}" + "{% elif a %}" * 15_000 + "{% endif %}",
    "{{ f(" + "".join(f"a{n}=1," for n in range(300)) + ") }}",
    "".join(f"{{% set a{n} = 1 %}}" for n in range(600)), "{# " + "a" * 190_000, "{% raw %}" + "{% " * 60_000,
    "{{ '" + "a" * 190_000, "{{ a" + "|e" * 90_000 + " }}", "{{ a" + " ~ a" * 9_000 + " }}", "{% for a in b %}" * 5_000,
])  # fmt: skip
def test_what_would_take_long_to_compile_is_refused(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source)
    assert caught.value.code in ("HF301", "HF302")


# ---- long texts that prompts are made of still work


@given(st.text("ab\n", max_size=40), st.text("ab\n", min_size=1, max_size=3), st.integers(-1, 3))
def test_searching_in_slices_is_searching(text: str, word: str, most: int) -> None:
    budget = Budget(5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(string_slices, "SLICE_CHARS", 4)
        for name in ("find", "rfind", "count", "partition", "rpartition", "split"):
            assert string_slices.SEARCHES[name](budget, text, word) == getattr(text, name)(word), name
        assert string_slices.split(budget, text, word, most) == text.split(word, most)
        assert string_slices.rsplit(budget, text, word, 1) == text.rsplit(word, 1)
        assert string_slices.replace(budget, text, word, "xyz", most) == text.replace(word, "xyz", most)
        patch.setattr(string_slices, "SLICE_CHARS", 40)
        for name in ("strip", "lstrip", "rstrip"):
            assert string_slices.strip(budget, text, None, name) == getattr(text, name)()
            assert string_slices.strip(budget, text, word, name) == getattr(text, name)(word)


def test_long_messages_go_through_what_templates_do_with_them() -> None:
    long = "\n  " + "word, " * 200_000 + "</think>\n\nthe answer \n"
    source = (
        "{% set c = messages[0].content %}{{ c.split('</think>')[-1].lstrip('\n') }}|{{ '</think>' in c }}|"
        "{{ c.startswith('x') }}|{{ (c | trim)[:4] }}|{{ c.rstrip('\n').endswith(' ') }}|{{ c.find('answer') }}|"
        "{{ c.replace('</think>', '')[-12:] | trim }}|{{ c.rsplit('</think>', 1) | length }}|"
        "{{ (c + '<end>') | length }}|{{ ('%s' % c) | length }}|"
        "{{ [c] | join | length }}|{{ c == c ~ '' }}|{{ messages[0] == messages[-1] }}|"
        "{{ c.partition('</think>')[2] | trim }}|{{ (messages | tojson) | length > 1200000 }}"
    )
    expected = (
        f"the answer \n|True|False|word|True|{long.find('answer')}|the answer|2|{len(long) + 5}|{len(long)}|"
        f"{len(long)}|True|True|the answer|True"
    )
    assert ChatTemplate(source).render([{"role": "user", "content": long}]) == expected


def test_json_is_the_same_in_pieces() -> None:
    value = {"a": [{"b": [1, 2.5, None, True, "é<"], "c": {}}] * 9, "d": "x"}
    whole = render("{{ v | tojson }}", v=value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "MAX_JSON_AT_ONCE", 0)
        assert render("{{ v | tojson }}", v=value) == whole


# ---- renderings on the event loop


def test_a_rendering_that_is_to_be_quick_is_given_up_and_can_be_done_again() -> None:
    slow = ChatTemplate("{% for m in messages %}{% for i in range(90000) %}{% endfor %}{% endfor %}done")
    chat = [{"role": "user", "content": "hi"}]
    with impatient(0.001), pytest.raises(SlowRenderingError):
        slow.render(chat)
    assert slow.render(chat) == "done"
    with impatient(1.0):
        assert QUICK.render(chat) == "quick"
        with pytest.raises(SlowRenderingError):
            compile_template("{{ 'compiled on the loop' }}")
    assert compile_template("{{ 'compiled on the loop' }}").render(chat) == "compiled on the loop"


def test_probes_have_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise finding a template out would take several times what a rendering may."""
    monkeypatch.setattr(template, "PROBE_CPU_S", 0.0)
    work = "{% for i in range(200) %}{% endfor %}"
    parts = ChatTemplate(work + "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}")
    assert not parts.takes_parts
    assert template_budget.MAX_CPU_S > 10 * template.PROBE_CPU_S
