"""A template that asks for 10^10 of anything is stopped after a stated number of steps; published ones are not."""

import io

import pytest
from jinja2 import environment

from tests.data.test_chat import TALK, said
from titanmoe.config import ConfigError
from titanmoe.data import chat, template
from titanmoe.data.chat import Chat, ChatError
from titanmoe.data.tokenizer import ByteTokenizer

N = "{% set n = namespace(x='ab', l=[1], d=0) %}"
DOUBLED = "{% for i in range(40) %}{% set n.x = BODY %}{% endfor %}"
MANY, END = "{% for i in range(99999) %}", "{% endfor %}"
LOOPS = {
    "nested loops": MANY + "{% for j in range(99999) %}{% endfor %}" + END,
    "loops that turn all down": MANY + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "macros that call themselves": "{% macro m(d) %}{{ m(d - 1) ~ m(d - 1) if d }}{% endmacro %}{{ m(60) }}",
    "a loop that calls itself": "{% for i in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "lists of ranges": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "slices": "{% set x = range(99999) | list %}{% for i in x %}{% set y = x[1:] %}{% endfor %}",
    "unpacked": "{% for i in range(99999) %}{{ [range(99999) | list] | sum(start=[]) | length }}{% endfor %}",
    "filters of lists": "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "selected": "{% for i in range(99999) %}{{ range(99999) | select('equalto', 1) | list | length }}{% endfor %}",
    "compared": N + "{% set n.x = [1] %}" + DOUBLED.replace("BODY", "[n.x, n.x]") + "{{ n.x == [n.x] }}",
    "written out": N + DOUBLED.replace("BODY", "[n.x, n.x]") + "{{ n.x }}",
    "as JSON": N + DOUBLED.replace("BODY", "{'a': n.x, 'b': n.x}") + "{{ n.x | tojson }}",
    "as keys": N + DOUBLED.replace("BODY", "(n.x, n.x)") + "{% set y = {n.x: 1} %}",
    "looked up": N + DOUBLED.replace("BODY", "(n.x, n.x)") + "{{ {}[n.x] }}",
    "got": N + DOUBLED.replace("BODY", "(n.x, n.x)") + "{{ {}.get(n.x) }}",
    "namespaces": "{% set n = namespace(x=[]) %}" + DOUBLED.replace("BODY", "namespace(a=n.x, b=n.x)") + "{{ n.x }}",
    "a list times a number": "{% set x = [0] * 10 ** 10 %}",
    "split": "{% for i in range(99999) %}{{ ('a ' * 99999).split(' ') | length }}{% endfor %}",
    "letters": "{% for i in range(99999) %}{{ ('a' * 99999) | list | length }}{% endfor %}",
    "what a loop asks of each": "{% for i in range(999) if not [" + "i," * 300 + "] %}{% endfor %}",
    "defaults": "{% macro m(i, a=[" + "i," * 300 + "]) %}{% endmacro %}{% for i in range(999) %}{{ m(1) }}{% endfor %}",
    "defaults of a call": "{% macro m() %}{% for i in range(999) %}{{ caller(1) }}{% endfor %}{% endmacro %}"
    "{% call(i, a=[" + "i," * 300 + "]) m() %}{% endcall %}",
    "parts of an attribute": "{{ (['a'] * 999) | map(attribute='" + "0." * 300 + "0') | list }}",
    "attributes to sort by": "{{ (['a'] * 999) | sort(attribute='" + "0," * 300 + "0') | length }}",
    "attributes of letters": "{{ ('a' * 999) | unique(attribute='" + "0." * 300 + "0') | list }}",
    "letters in a loop": "{% for i in range(99999) %}{% for c in 'a' * 99999 %}{% break %}{% endfor %}{% endfor %}",
}
TEXTS = {
    "times": "{{ 'a' * 10 ** 10 }}",
    "times, turned round": "{{ 10 ** 10 * 'a' }}",
    "plus": N + DOUBLED.replace("BODY", "n.x + n.x"),
    "tilde": N + DOUBLED.replace("BODY", "n.x ~ n.x"),
    "percent": N + DOUBLED.replace("BODY", "'%s%s' % (n.x, n.x)"),
    "format": N + DOUBLED.replace("BODY", "'{0}{0}'.format(n.x)"),
    "join": N + DOUBLED.replace("BODY", "[n.x, n.x] | join"),
    "joined by a long text": "{{ range(9999) | join('a' * 9999) }}",
    "join of a text": "{{ ('a' * 9999).join(range(9999) | map('string')) }}",
    "replace": N + DOUBLED.replace("BODY", "n.x | replace('b', 'bb' * 99) | replace('a', 'bb' * 99)"),
    "the text's own replace": N + DOUBLED.replace("BODY", "n.x.replace('b', 'bb' * 99)"),
    "replaced nothing": "{{ ('a' * 9999) | replace('', 'b' * 9999) }}",
    "set": N + "{% for i in range(40) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "calls": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + N + DOUBLED.replace("BODY", "m(n.x)"),
    "its own text": "{% for i in range(9999) %}" + "a" * 9999 + "{% endfor %}",
    "indented": "{{ ('\n' * 999999) | indent(16, true, true) | indent(16) }}",
    "as JSON, indented": "{{ [[[range(99999) | list] * 9] * 9] | tojson(indent=16) }}",
}
REFUSED = {
    "{{ 2 ** (10 ** 10) }}": "makes a number of more than 10,000 bits",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}": "10,000 bits",
    "{{ '%10000000000d' % 1 }}": "formats a field of 1,000 characters or more",
    "{{ '%*d' % (10000000000, 1) }}": "formats a field",
    "{{ '{:10000000000}'.format(1) }}": "formats a field",
    "{{ '{x:10000000000}'.format_map({'x': 1}) }}": "formats a field",
    "{{ '{:{}}'.format(1, 10000000000) }}": "formats a field",
    "{{ 'a' | indent(10 ** 10, true) }}": "indents by more than 16",
    "{{ [1] | tojson(indent=10 ** 10) }}": "indents by more than 16",
    "{{ [1] | tojson(separators=['a' * 99, '']) }}": "separates by more than 16",
    "{{ 1.5 | round(10 ** 10) }}": "rounds to more than 300 digits",
}
ANSWER = "{% for m in messages %}{{ m.content }}{% endfor %}"


def refused(text, messages=TALK) -> str:
    with pytest.raises(ConfigError) as error:
        Chat(text, "t", ByteTokenizer()).encode(messages)
    (problem,) = error.value.problems
    assert "\n" not in problem and len(problem) < 300
    return problem


@pytest.fixture
def small(monkeypatch):
    for name, most in (("STEPS", 150_000), ("STEPS_PER_MESSAGE", 100), ("CHARACTERS", 150_000)):
        monkeypatch.setattr(template, name, most)


@pytest.mark.parametrize("name", LOOPS)
def test_steps_end(name, small):
    said = refused(LOOPS[name])
    assert "the chat template t takes more than 1" in said or "makes or reads more than 1" in said, said


@pytest.mark.parametrize("name", TEXTS)
def test_texts_end(name, small):
    said = refused(TEXTS[name])
    assert (
        "characters, the limit for this conversation: use another (chat_template)" in said or "takes more than" in said
    )


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_before_it_is_done(text):
    assert REFUSED[text] in refused(text)


@pytest.mark.parametrize("name", ["center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode"])
def test_methods_that_widen_a_text_do_not_exist(name):
    with pytest.raises(ChatError, match=f"access to attribute '{name}' of 'str' object is unsafe"):
        Chat(f"{{{{ 'a'.{name}(10 ** 9) }}}}", "t", ByteTokenizer()).encode(TALK)
    with pytest.raises(ChatError, match="unsafe"):
        Chat(f"{{{{ ('a' | attr('{name}'))(10 ** 9) }}}}", "t", ByteTokenizer()).encode(TALK)
    with pytest.raises(ChatError):
        Chat("{{ (5).to_bytes(10 ** 9, 'big') }}", "t", ByteTokenizer()).encode(TALK)


@pytest.mark.parametrize("name", ["center(10 ** 10)", "batch(10 ** 10, 1)", "slice(10 ** 10)", "wordwrap", "pprint"])
def test_filters_that_no_template_needs_do_not_exist(name):
    with pytest.raises(ConfigError, match="not Jinja: No filter named"):
        Chat(f"{{{{ 'a' | {name} }}}}", "t", ByteTokenizer())


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "[" * 900 + "]" * 900 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "9" * 5000 + " }}",
        "{{ 'a' | replace('a', 'aaaaaaaaaaaaaaaa')" + " | replace('a', 'aaaaaaaaaaaaaaaa')" * 20 + " }}",
    ],
)
def test_templates_that_cannot_be_compiled(text, small):
    assert (
        "t: the chat template cannot be compiled" in (said := refused(text)) or "takes more" in said or "makes" in said
    )


@pytest.mark.parametrize("part", ["{% for i in a %}{% endfor %}", "{{ a }}", "a{# a #}", "{{ [" + "1," * 30 + "] }}"])
def test_what_would_take_long_to_compile_is_not_compiled(part, monkeypatch):
    monkeypatch.setattr(environment.Environment, "from_string", None)
    text = (part * chat.MOST_TEMPLATE)[: chat.MOST_TEMPLATE]
    assert "t: the chat template has more than 20,000 tokens, the limit" in refused(text)


def test_white_space_does_not_count_as_tokens(monkeypatch):
    monkeypatch.setattr(chat, "MOST_TOKENS", 10)
    assert len(Chat("{{" + " " * 999 + "messages [0].content" + " " * 999 + "}}", "t", ByteTokenizer()).encode(TALK)[0])
    refused("{{ messages[0].content }}{{ 1 }}")


def test_a_template_is_read_no_further_than_the_limit(monkeypatch):
    class Endless(io.StringIO):
        def read(self, size=-1):
            assert size == chat.MOST_TEMPLATE + 1
            return "a" * size

    monkeypatch.setattr(chat.Path, "open", lambda *_, **__: Endless())
    with pytest.raises(ConfigError, match="has more than 131,072 characters"):
        chat.open_chat("t.jinja", ByteTokenizer())


def test_a_template_of_a_great_length(monkeypatch, tmp_path):
    monkeypatch.setattr(chat, "MOST_TEMPLATE", 100)
    (tmp_path / "t.jinja").write_text("a" * 101)
    with pytest.raises(ConfigError, match=r"t\.jinja: the chat template has more than 100 characters"):
        chat.open_chat(str(tmp_path / "t.jinja"), ByteTokenizer())


def test_recursion_without_an_end_is_the_conversations_fault():
    with pytest.raises(ChatError, match="nested too deeply"):
        Chat("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "t", ByteTokenizer()).encode(TALK)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ChatError, match="nested too deeply"):
        Chat(ANSWER, "t", ByteTokenizer()).encode([*TALK, {"role": "assistant", "content": deep}])


def test_an_error_is_reported_in_a_short_line():
    with pytest.raises(ChatError) as error:
        Chat("{{ raise_exception('long\n' * 9999) }}", "t", ByteTokenizer()).encode(TALK)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_long_conversations_have_more_to_spend(small):
    """The budget grows with the messages, as a template's needs do."""
    talk = [{"role": "assistant", "content": "word " * 10_000}, *TALK[1:]]
    trimmed = "{% for m in messages %}{{ m.content | trim | replace('word', 'work') | trim }}{% endfor %}"
    assert len(Chat(trimmed, "t", ByteTokenizer()).encode(talk)[0]) > 49_000
    many = TALK * 100
    text = "{% if m.role == 'user' and 'x' not in m.content %}{{ m | tojson }}{% else %}{{ m.content }}{% endif %}"
    found, _ = said(Chat("{% for m in messages %}" + text + "{% endfor %}", "t", ByteTokenizer()), many)
    assert found.count('"role": "user"') == 200


def test_what_templates_do_is_as_without_the_count():
    """Against Jinja's own sandbox, on what published templates do."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = (
        "{% set ns = namespace(found=false, n=0) %}"
        "{% macro show(x, b='c') %}<{{ x }}{{ b }}>{{ caller() if caller }}{% endmacro %}"
        "{% for m in messages[1:] if m.role != 'tool' %}{{ loop.index }}/{{ loop.length }} {{ m['role'] | upper }}:"
        "{{ m.content.split(' ')[0] | trim }}{{ m.content[::-1][:3] }}{% if not loop.last %},{% endif %}"
        "{% set ns.n = ns.n + loop.index0 * 2 %}{% set ns.found = ns.found or 'W' in m.content %}"
        "{{ show(m.role, b='d') }}{% call show(1) %}in{% endcall %}{% endfor %}{{ ns.n }}{{ ns.found }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
        "{{ messages | map(attribute='role') | unique | sort | list }}{{ {'a': 1, 'b': [1, 2]}.items() | list }}"
        "{{ 'a%s %5.2f' % ('b', 1.5) }}{{ '{} {x}'.format(1, x=2) }}{{ 'x' ~ 1 ~ none }}{{ 7 // 2 ** 1 % 5 }}"
        "{{ 'a\nb' | indent(2) }}{{ 1.55 | round(1, 'floor') }}{{ (1 < 2 <= 3) and (1, 2) == (1, 2) }}"
        "{{ missing | default(3) }}"
        "{{ [3, 1] | sort | first }}"
        "{{ 'a,b'.replace(',', '') | replace('a', 'c') }}{{ '-' * 3 }}{{ ([1] * 2) | length }}"
        "{% for k, v in {'z': 1} | dictsort %}{{ k }}{{ v }}{% else %}none{% endfor %}{{ messages[0] is mapping }}"
        "{% for i in range(3) recursive %}{{ i }}{{ loop([]) }}{% endfor %}{{ 3 is in [3] }}{{ messages | length > 2 }}"
        "{% filter upper %}x{% endfilter %}{% set y %}q{{ 1 }}{% endset %}{{ y }}{% for c in 'ab' %}{{ c }}{% endfor %}"
    )
    options = dict(messages=TALK, add_generation_prompt=False)
    expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text).render(options)
    assert Chat(text, "t", ByteTokenizer())._render(TALK) == expected
