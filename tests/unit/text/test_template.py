"""Chat templates: what they may do, what they may not, and how their refusals reach a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, RequestError, UnsupportedOptionError
from holdfast.text.templates.template import ChatTemplate, compile_template, load_template

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def render(source: str, messages: Any = None, **options: Any) -> str:
    return ChatTemplate(source).render(user("hi") if messages is None else messages, **options)


def test_renders_with_variables_and_prompt() -> None:
    assert render(PLAIN, add_generation_prompt=True) == "[user]hi\n>"
    assert render("{{ bos_token }}{{ missing }}", variables={"bos_token": "<s>"}) == "<s>"


def test_compiled_once() -> None:
    assert compile_template(PLAIN) is compile_template(PLAIN)


def test_generation_blocks_and_loop_controls_are_known() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, [*user("one"), *user("two")]) == "one"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'


def test_the_templates_own_words_are_passed_on() -> None:
    with pytest.raises(RequestError, match="only user roles") as caught:
        render("{{ raise_exception('only user roles') }}")
    assert caught.value.code == "HF301"


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ none.x.y }}", "{{ messages[7].role }}", "{{ 'a' + 1 }}"])
def test_a_failing_template_fails_its_request_alone(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "HF301"


def test_bad_syntax_is_refused() -> None:
    with pytest.raises(RequestError, match="failed"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{% set n = namespace(__class__=1) %}",
    "{{ messages.append(1) }}",
    "{{ range(10**9) | length }}",
    "{% for a in range(500) %}{% for b in range(500) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 9 ** 99 ** 99 }}",
])  # fmt: skip
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "HF302"


DOUBLED = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set ns.x = GROWN %}{% endfor %}"
NESTED = "{% set ns = namespace(x=[1], y=[1], t=(1,)) %}{% for i in range(60) %}GROWN{% endfor %}"
NEST = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"


@pytest.mark.parametrize("source", [
    "{{ ('a'.ljust(400000000)) | length }}",
    "{{ 'a'.zfill(width) }}".replace("width", "4" * 9),
    "{{ ('%400000000d' % 1) | length }}",
    "{{ ('%*d' % (400000000, 1)) | length }}",
    "{{ ('%(a(b))400000000d' % {'a(b)': 1}) | length }}",
    "{{ '%400000000d' | format(1) | length }}",
    "{{ '{:400000000}'.format(1) | length }}",
    "{{ '{:{w}}'.format(1, w='400000000') | length }}",
    "{{ '{a:400000000}'.format_map({'a': 1}) | length }}",
    "{{ 'a' | center(400000000) | length }}",
    "{{ ('a\n' * 100000) | indent(100000) | length }}",
    "{{ ('a\n' * 100000) | indent('x' * 100000) | length }}",
    "{{ ('\t' * 100000).expandtabs(100000) | length }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) | length }}",
    "{{ ('b' * 100000).join('a' * 100000) | length }}",
    "{{ ('a' * 100000) | join('b' * 100000) | length }}",
    "{{ ('a' * 100000) | map('upper') | join('b' * 100000) | length }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) | length }}",
    "{{ ('%(k)s' * 100000) % {'k': 'a' * 100000} }}",
    "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "{{ [1] | batch(400000000, 0) | list | length }}",
    "{{ 'a' | map('center', 400000000) | list | length }}",
    "{{ (1).to_bytes(400000000, 'big') | length }}",
    "{{ ('a' * 100000).encode('punycode') }}",
    DOUBLED.replace("GROWN", "ns.x ~ ns.x"),
    DOUBLED.replace("GROWN", "ns.x + ns.x"),
    DOUBLED.replace("GROWN", "ns.x | replace('a', 'aa')"),
    DOUBLED.replace("GROWN", "'{0}{0}'.format(ns.x)"),
    DOUBLED.replace("GROWN", "'%s%s' % (ns.x, ns.x)"),
    DOUBLED.replace("GROWN", "[ns.x, ns.x] | join"),
    DOUBLED.replace("{% set ns.x = GROWN %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    NESTED.replace("GROWN", NEST) + "{{ ns.x }}",
    NESTED.replace("GROWN", NEST) + "{{ ns.x | string | length }}",
    NESTED.replace("GROWN", NEST) + "{{ ns.x | tojson | length }}",
    NESTED.replace("GROWN", NEST) + "{{ (ns.x ~ 'a') | length }}",
    NESTED.replace("GROWN", NEST) + "{{ ns.x == ns.y }}",
    NESTED.replace("GROWN", NEST) + "{{ ns.x is eq ns.y }}",
    NESTED.replace("GROWN", NEST) + "{{ ns.x in [ns.y] }}",
    NESTED.replace("GROWN", NEST) + "{{ [ns.y].index(ns.x) }}",
    NESTED.replace("GROWN", "{% set ns.t = (ns.t, ns.t) %}") + "{{ {ns.t: 1} }}",
    "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set s = 'a' * 100000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "{% set s = 'a' * 100000 %}{% for a in s %}{% for b in s if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set l = [1] * 1000 %}{% for a in l recursive %}{{ loop(l) if loop.depth < 9 }}{% endfor %}",
    "{% set y %}{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "{{ [[1] * 1000] * 1000 | sum(start=[]) }}{{ ([[1]] * 100000) | sum(start=[]) | length }}",
])  # fmt: skip
def test_growth_and_work_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these took gigabytes or would never have ended, in the probe at compile time already."""
    monkeypatch.setattr("holdfast.text.templates.budget.MAX_STEPS", 20_000)
    monkeypatch.setattr("holdfast.text.templates.budget.MAX_ITEMS", 200_000)
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.code == "HF302", caught.value


def test_filters_for_web_pages_are_not_there() -> None:
    for name in ("urlize", "xmlattr", "wordwrap", "pprint", "striptags"):
        with pytest.raises(RequestError, match=name):
            render("{{ 'a' | " + name + " }}")


def test_what_templates_really_do_is_as_before() -> None:
    source = (
        "{% set ns = namespace(seen=false, out=[]) %}{% for m in messages if m.role != 'system' %}"
        "{{ loop.index }}/{{ loop.length }}{{ '|' if loop.last }}{% set ns.out = ns.out + [m.content] %}{% endfor %}"
        "{{ ns.out | join(', ') }} {{ '%s-%03d' % ('a', 7) }} {{ '{:>4}'.format('x') }} {{ 'a' ~ 1 ~ none }}"
        " {{ messages[-1].content.split('i')[0].replace('h', 'H').strip() }} {{ [1, 2] == [1, 2] }} {{ {'a': (1, 2)} }}"
        " {{ {'b': [1]} | tojson(indent=2) }} {{ 'x' * 3 }} {{ messages | map(attribute='role') | list }}"
        " {{ ['b', 'a'] | sort | first }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ 'a' in 'cat' }} {{ 1 if 'role' in messages[0] }}"
    )
    expected = "1/1|hi a-007    x a1None H True {'a': (1, 2)} {\n  \"b\": [\n    1\n  ]\n} xxx ['user'] a 3 32 True 1"
    assert render(source) == expected


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.text.templates.budget.MAX_VALUE_CHARS", 1000)
    with pytest.raises(RequestError, match="1000 characters"):
        render("{% for i in range(200) %}{{ 'xxxxxxxxxx' }}{% endfor %}")


def test_parts_are_joined_where_the_template_wants_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(PLAIN, user(parts)) == "[user]one\ntwo\n"
    assert not ChatTemplate(PLAIN).takes_parts


def test_parts_are_kept_where_the_template_reads_them() -> None:
    assert ChatTemplate(PARTS).takes_parts
    assert render(PARTS, user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])) == "(one)(two)"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=kind) as caught:
        render(PLAIN, user([{"type": "text", "text": "see"}, {"type": kind, kind: {}}]))
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize("messages", [[], {}, "hi", [1], [{"content": "x"}], user(7), user([{"type": "text"}])])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        render(PLAIN, messages)


def test_messages_are_left_as_they_are() -> None:
    messages = user([{"type": "text", "text": "one"}])
    render(PLAIN, messages, continue_final_message=True)
    assert messages == user([{"type": "text", "text": "one"}])


def test_objects_reach_the_template_as_names_only() -> None:
    assert render("{{ thing }}", variables={"thing": Path("/")}) == "<PosixPath>"


@pytest.mark.parametrize(("source", "content", "expected"), [
    (PLAIN, "I think ", "[user]I think "),
    ("{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}", "I think ", "I think"),
    (PARTS, [{"type": "text", "text": "I think "}], "(I think "),
])  # fmt: skip
def test_the_last_message_can_be_continued(source: str, content: Any, expected: str) -> None:
    assert render(source, user(content), continue_final_message=True) == expected


def test_continuing_needs_text_that_the_template_shows() -> None:
    with pytest.raises(RequestError, match="whole"):
        render("nothing", continue_final_message=True)
    with pytest.raises(RequestError, match="no text"):
        render(PLAIN, user(None), continue_final_message=True)
    with pytest.raises(RequestError, match="cannot both be true"):
        render(PLAIN, continue_final_message=True, add_generation_prompt=True)


def test_reserved_names_cannot_be_given() -> None:
    with pytest.raises(RequestError, match="messages"):
        render(PLAIN, variables={"messages": []})


def test_a_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(PLAIN)
    assert load_template(str(path)) == PLAIN
    assert load_template(PLAIN) == PLAIN
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_template(str(tmp_path / "missing.jinja"))


def test_depth_is_bounded() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(RequestError, match="deep") as caught:
        render(PLAIN, variables={"a": deep})
    assert caught.value.field == "chat_template_kwargs"
    with pytest.raises(RequestError, match="deep"):
        render(PLAIN, [{"role": "user", "content": "hi", "x": deep}])
    with pytest.raises(RequestError, match="deep"):
        render(PLAIN, tools=[{"a": deep}])


def test_time_is_bounded_by_the_threads_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.text.templates.budget.MAX_CPU_S", 0.0)
    with pytest.raises(RequestError, match="0 s in one rendering"):
        render("{% for i in range(100) %}{{ i }}{% endfor %}")


def test_several_messages_of_the_system_are_joined_where_a_template_takes_one() -> None:
    chat = [{"role": "system", "content": "one"}, {"role": "system", "content": "two"}, *user("hi")]
    assert render(PLAIN, chat) == "[system]one\n[system]two\n[user]hi\n"
    first_only = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('one system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    assert render(first_only, chat) == "one\n\ntwo|hi"
    with pytest.raises(RequestError, match="one system"):
        render(first_only, [*user("hi"), chat[0]])
