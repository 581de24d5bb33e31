"""A template that asks for 10^10 of anything is stopped at a limit of time or of memory, which published ones never
come near."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.data.test_chat import TALK, text_and_learned
from titanmoe.config import ConfigError
from titanmoe.data import chat, chat_template
from titanmoe.data.chat import ChatEncoder, ChatError
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer

N = "{% set n = namespace(x='ab') %}"
DOUBLED = N + "{% for i in range(40) %}{% set n.x = BODY %}{% endfor %}"
MANY, END = "{% for i in range(99999) %}", "{% endfor %}"
NESTED = MANY + MANY + END + END
SLOW = {
    "nested loops": NESTED,
    "macros that call themselves": "{% macro m(d) %}{{ m(d - 1) ~ m(d - 1) if d }}{% endmacro %}{{ m(60) }}",
    "filters of lists": MANY + "{{ range(99999) | map('string') | join | length }}" + END,
    "lists in lists, written out": DOUBLED.replace("BODY", "[n.x, n.x]") + "{{ n.x }}",
    "a number of a billion digits": "{% set n = namespace(x=3) %}" + MANY + "{% set n.x = n.x * n.x %}" + END,
}
LARGE = {
    "a text times a number": "{{ 'x' * 10 ** 9 }}",
    "a list times a number": "{% set x = [0] * 10 ** 10 %}",
    "a text, doubled": DOUBLED.replace("BODY", "n.x ~ n.x"),
    "a wide field": "{{ '%10000000000d' % 1 }}",
    "joined by a long text": "{{ range(9999) | join('a' * 9999) }}",
    "its own text": MANY + "a" * 9999 + END,
}
COMPLETION = "{% for m in messages %}{{ m.content }}{% endfor %}"


def opened(text) -> ChatEncoder:
    return ChatEncoder(text, "t", ByteTokenizer())


def refused(text, messages=TALK) -> str:
    with pytest.raises(ConfigError) as error:
        opened(text).encode(messages)
    (problem,) = error.value.problems
    assert "\n" not in problem and len(problem) < 300
    return problem


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "SECONDS_PER_MB", 0.0)
    monkeypatch.setattr(chat_template, "MEMORY", 64 << 20)
    monkeypatch.setattr(chat_template, "MEMORY_PER_BYTE", 0)


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_ends(name, small):
    assert refused(SLOW[name]) == (
        "the chat template t takes more than 0.2 s, the limit for this conversation: use another (chat_template)"
    )


@pytest.mark.parametrize("name", LARGE)
def test_what_takes_much_memory_ends(name, small):
    assert refused(LARGE[name]) == (
        "the chat template t takes more than 64 MiB of memory, the limit for this conversation: use another "
        "(chat_template)"
    )


def test_a_huge_range_is_refused_by_jinja_itself():
    with pytest.raises(ChatError, match="the chat template t refuses the messages: Range too big"):
        opened("{% for i in range(10 ** 9) %}{% endfor %}").encode(TALK)


def test_recursion_without_an_end_is_the_conversations_fault():
    with pytest.raises(ChatError, match="nested too deeply"):
        opened("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").encode(TALK)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ChatError, match="nested too deeply"):
        opened(COMPLETION).encode([*TALK, {"role": "assistant", "content": deep}])


@pytest.mark.parametrize("text", ["{{ ''.__class__.mro() }}", "{{ [].append(1) }}", "{{ messages.clear() }}"])
def test_what_a_sandbox_forbids(text):
    with pytest.raises(ChatError, match=r"refuses the messages: .*( is unsafe|is not safely callable)"):
        opened(text).encode(TALK)


@pytest.mark.parametrize("text", ["{{ lipsum() }}", "{{ [1, 2] | random }}", "{{ strftime_now('%Y') }}"])
def test_nothing_depends_on_chance_or_the_date(text):
    with pytest.raises((ChatError, ConfigError), match=r"'(lipsum|strftime_now)' is undefined|No filter named"):
        opened(text).encode(TALK)


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "9" * 5000 + " }}",
    ],
)
def test_templates_that_cannot_be_compiled(text):
    assert refused(text).startswith("t: the chat template cannot be compiled: ")


@pytest.mark.parametrize(
    ("text", "seconds", "limit"),
    [
        ("{% for i in a %}{% endfor %}" * 4000, 0.2, "0.2 s"),
        ("{{ 'ab' * 9999999 }}", 5.0, "64 MiB of memory"),  # which Jinja works out when it compiles
    ],
)
def test_compiling_has_limits_too(text, seconds, limit, small, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", seconds)
    why = f"takes more than {limit}, the limit for a template: use another (chat_template)"
    assert refused(text) == f"t: compiling the chat template {why}"


def test_a_template_is_read_no_further_than_the_limit(monkeypatch):
    class Endless(io.StringIO):
        def read(self, size=-1):
            assert size == chat.MAX_TEMPLATE + 1
            return "a" * size

    monkeypatch.setattr(chat.Path, "open", lambda *_, **__: Endless())
    with pytest.raises(ConfigError, match="has more than 131,072 characters"):
        chat.open_chat_encoder("t.jinja", ByteTokenizer())


def test_a_template_of_a_great_length(monkeypatch, tmp_path):
    monkeypatch.setattr(chat, "MAX_TEMPLATE", 100)
    (tmp_path / "t.jinja").write_text("a" * 101)
    with pytest.raises(ConfigError, match=r"t\.jinja: the chat template has more than 100 characters"):
        chat.open_chat_encoder(str(tmp_path / "t.jinja"), ByteTokenizer())


def test_an_error_is_reported_in_a_short_line():
    with pytest.raises(ChatError) as error:
        opened("{{ raise_exception('long\n' * 9999) }}").encode(TALK)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_long_conversations_have_more_to_spend(monkeypatch):
    monkeypatch.setattr(chat_template, "MEMORY", 1 << 20)
    talk = [{"role": "assistant", "content": "word " * 400_000}, *TALK[1:]]
    trimmed = "{% for m in messages %}{{ m.content | trim | replace('word', 'work') | trim }}{% endfor %}"
    text, _ = opened(trimmed)._render_with_marks(talk)
    assert text.count("work") == 400_000


def test_rendering_is_that_of_transformers(bpe):
    """On what published templates do."""
    from transformers import PreTrainedTokenizerFast

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
        "{{ missing | default(3) }}{{ messages[0] | tojson(indent=2) }}{{ '<é>' | tojson }}{{ 'a' | center(9) }}"
        "{{ [3, 1] | sort | first }}{{ 'a'.ljust(4) }}\n    {% if true %}\n  yes\n    {% endif %}\n"
        "{{ 'a,b'.replace(',', '') | replace('a', 'c') }}{{ '-' * 3 }}{{ ([1] * 2) | length }}"
        "{% for k, v in {'z': 1} | dictsort %}{{ k }}{{ v }}{% else %}none{% endfor %}{{ messages[0] is mapping }}"
        "{% for i in range(3) recursive %}{{ i }}{{ loop([]) }}{% endfor %}{{ 3 is in [3] }}{{ messages | length > 2 }}"
        "{% filter upper %}x{% endfilter %}{% set y %}q{{ 1 }}{% endset %}{{ y }}{% for c in 'ab' %}{{ c }}{% endfor %}"
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    transformers_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    chat = ChatEncoder(text, "t", open_tokenizer(str(bpe)))
    for prompt in False, True:
        expected = transformers_tokenizer.apply_chat_template(
            TALK, chat_template=text, tokenize=False, add_generation_prompt=prompt
        )
        assert chat._render(TALK, prompt) == expected
    assert opened(COMPLETION)._render([{"content": "\ud800 \U0001f98a"}]) == "\ud800 \U0001f98a"


# ---- the process


def process_of(chat: ChatEncoder) -> subprocess.Popen:
    (worker,) = chat._compiled._idle
    return worker._process


def test_one_process_renders_what_there_is_until_a_limit_ends_it(small):
    chat = opened("{% if messages[0].content == 'bomb' %}" + NESTED + "{% endif %}{{ messages[0].nothing.at.all }}")
    first = process_of(chat)
    for _ in range(2):
        with pytest.raises(ChatError, match="has no attribute 'nothing'"):
            chat.encode(TALK)
    assert process_of(chat) is first
    with pytest.raises(ConfigError, match=r"takes more than 0\.2 s"):
        chat.encode([{"role": "assistant", "content": "bomb"}])
    assert first.returncode == -signal.SIGPROF, "it has ended, and is no zombie"
    with pytest.raises(ChatError, match="has no attribute 'nothing'"):
        chat.encode(TALK)
    assert process_of(chat).pid != first.pid


def test_a_response_that_was_not_waited_for_answers_nothing_else(monkeypatch):
    chat = opened(COMPLETION)
    first = process_of(chat)

    def interrupted(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.encode(TALK)
    assert text_and_learned(chat, TALK[:3])[0] == "Be brief.Why?Because, née."
    assert process_of(chat) is not first


def test_a_process_that_something_else_ends_is_reported(small):
    chat = opened(COMPLETION)
    process_of(chat).kill()
    with pytest.raises(ConfigError, match=r"the chat template t ends the process that renders it \(code -9\)"):
        chat.encode(TALK)


def test_a_process_ends_with_its_chat():
    chat = opened(COMPLETION)
    process = process_of(chat)
    assert process.poll() is None
    del chat
    assert process.returncode == -signal.SIGKILL


def test_a_fork_has_a_process_of_its_own():
    chat = opened(COMPLETION)
    if child := os.fork():
        assert text_and_learned(chat, TALK[:3])[0] == "Be brief.Why?Because, née."
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert text_and_learned(chat, TALK)[0].endswith("the fox 日") and process_of(chat).poll() is None
        return
    code = 1
    try:
        parent_process = process_of(chat).pid
        code = 0 if chat._render(TALK).endswith("the fox 日") and process_of(chat).pid != parent_process else 2
        chat._compiled._idle[0].end()
    finally:
        os._exit(code)


DIES = """
import os, signal
from titanmoe.data.chat_template import ChatTemplate
template = ChatTemplate("{{ x }}", "", "")
print(template._idle[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_ends_with_its_parent():
    done = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    ended = time.monotonic() + 10
    while os.path.exists(f"/proc/{int(done.stdout)}"):
        assert time.monotonic() < ended
        time.sleep(0.01)
