"""What the assistant said, and nothing else, counts towards the loss."""

import json
import re
import sys

import numpy as np
import pytest

from tests.support.byte_pairs import CHATML, MARKED
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.data.chat import ChatEncoder, ChatError, open_chat_encoder
from titanmoe.data.formats import FORMATS
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenize import plan_shards
from titanmoe.data.tokenize_unit import TokenizeJob
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because, née."},
    {"role": "user", "content": "日本"},
    {"role": "assistant", "content": "the fox 日"},
]


def text_and_learned(chat, messages) -> tuple[str, list[str]]:
    """The whole text, and the runs of tokens that count."""
    tokens, weights = chat.encode(messages)
    assistant_mask = weights > 0
    assert len(tokens) == len(assistant_mask)
    runs: list[list[int]] = []
    for n, (token, counts) in enumerate(zip(tokens.tolist(), assistant_mask.tolist(), strict=True)):
        if counts:
            runs = [*runs, []] if not n or not assistant_mask[n - 1] else runs
            runs[-1].append(token)

    def text(ids):
        decode = getattr(chat.tokenizer, "_plain", None)
        return decode.decode(ids, skip_special_tokens=False) if decode else chat.tokenizer.decode(ids)

    return text(tokens.tolist()), [text(run) for run in runs]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(("template", "after"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_the_assistants_part_counts(kind, template, after, bpe):
    tokenizer = open_tokenizer("bytes" if kind == "bytes" else str(bpe))
    text, runs = text_and_learned(ChatEncoder(template, "t", tokenizer), TALK)
    assert runs == [TALK[2]["content"] + after, TALK[4]["content"] + after]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?")
    assert "\ufdd0" not in text and text.count("<|im_end|>") == 5


def test_tokens_and_masks_are_those_of_transformers(bpe):
    from transformers import PreTrainedTokenizerFast

    transformers_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    for template in MARKED, CHATML:
        options = dict(chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        expected = transformers_tokenizer.apply_chat_template(TALK, **options)
        tokens, weights = ChatEncoder(template, "t", open_tokenizer(str(bpe))).encode(TALK)
        assistant_mask = weights > 0
        assert tokens.tolist() == expected["input_ids"]
        if template == MARKED:  # theirs cannot otherwise know what the assistant said
            assert assistant_mask.tolist() == [bool(mask) for mask in expected["assistant_masks"]]


def test_a_token_on_both_sides_of_the_border_counts(bpe):
    """Byte-level BPE joins a space with the word after it."""
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    _, runs = text_and_learned(
        ChatEncoder(template, "t", open_tokenizer(str(bpe))), [{"role": "assistant", "content": "the fox"}]
    )
    assert runs == [" the fox"]


def test_a_template_that_shows_no_assistant_messages_is_refused(bpe):
    tokenizer = ByteTokenizer()
    each = "{% for m in messages %}%{% endfor %}"
    forgets = each.replace(
        "%}%{", "%}{% if loop.last or m.role != 'assistant' %}{{ m.role }} {{ m.content }};{% endif %}{"
    )
    with pytest.raises(ConfigError) as error:
        ChatEncoder(forgets, "templates/t", tokenizer).encode(TALK)
    (problem,) = error.value.problems
    assert "templates/t does not show what the assistant said: the first 3 of 5 messages are rendered differ" in problem
    assert "a copy of the template and name that with --chat-template or data.chat_template" in problem
    other = (
        each.replace("%}%{", "%}<{{ m.role }}>{{ m.content }}{") + "{% if add_generation_prompt %}[reply]{% endif %}"
    )
    with pytest.raises(ConfigError, match="message 3, the assistant's, is rendered differently up to where it begins"):
        ChatEncoder(other, "t", tokenizer).encode(TALK)


THINKS = """\
{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" + (("<think>" + m.reasoning_content + "</think>\\n") if loop.last else "") }}
        {{- m.content + "<|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
"""Of the assistant's reasoning it keeps only the last."""
REASONED = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "reasoning": "hm", "content": "Because."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "reasoning": "so", "content": "Thus."},
]


def test_the_refusal_says_where_the_marks_go():
    with pytest.raises(ConfigError) as error:
        ChatEncoder(THINKS, "t", ByteTokenizer()).encode(REASONED)
    (why,) = error.value.problems
    head, tail = r"{{ '<|im_start|>assistant\n' }}{% generation %}", r"{{ '<|im_end|>\n' }}{% endgeneration %}"
    assert f"{head}...{tail}, where ... is what writes the message (from line 2 of the template on)" in why
    marked = THINKS.replace('{{- "<|im_start|>assistant\\n" + (', "{{- '' }}" + head + "{{- (")
    marked = marked.replace('m.content + "<|im_end|>\\n" }}\n    {%- else', "m.content }}" + tail + "\n    {%- else")
    text, runs = text_and_learned(ChatEncoder(marked, "t", ByteTokenizer()), REASONED)
    assert runs == ["Because.<|im_end|>\n", "<think>so</think>\nThus.<|im_end|>\n"]
    assert text == ChatEncoder(THINKS, "t", ByteTokenizer())._render(REASONED)


@pytest.mark.parametrize("key", ["thinking", "reasoning_content"])
def test_a_null_beside_the_reasoning_does_not_hide_it(key):
    message = {"role": "assistant", "content": "x", "thinking": None, "reasoning_content": None, "reasoning": "None. "}
    template = "{% for m in messages %}{{ m.role + ': ' + (m.KEY or '') + m.content }}{% endfor %}"
    text, _ = text_and_learned(
        ChatEncoder(template.replace("KEY", key), "t", ByteTokenizer()), [{"role": "system", "content": ""}, message]
    )
    assert text == "system: assistant: None. x"


def test_an_assistant_that_begins_has_no_header_counted():
    greeted = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
    assert text_and_learned(ChatEncoder(CHATML, "t", ByteTokenizer()), greeted)[1] == ["Hello<|im_end|>\n"]
    with pytest.raises(ChatError, match="the first message is the assistant's, and the chat template t cannot be ren"):
        ChatEncoder("{{ messages[0].role }}" + CHATML, "t", ByteTokenizer()).encode(greeted)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": None, "b": [1]}}}
CALLED = [
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "None?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "I add"},
    {"role": "tool", "content": "4", "tool_calls": None},
    {"role": "assistant", "content": "four"},
]
ANY_CONTENT = (
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}{{ m.reasoning_content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_null_and_parts_as_transformers_renders_them(bpe):
    """Where the template handles them."""
    from transformers import PreTrainedTokenizerFast

    transformers_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    expected = transformers_tokenizer.apply_chat_template(CALLED, chat_template=ANY_CONTENT, tokenize=False)
    assert expected.startswith('<user>What is None?;<assistant>I addadd{"a": null, "b": [1]};<tool>4;')
    text, runs = text_and_learned(ChatEncoder(ANY_CONTENT, "t", ByteTokenizer()), CALLED)
    assert text == expected and runs == ['I addadd{"a": null, "b": [1]};', "four;"]


@pytest.mark.parametrize("write", ["{{ m.content }}", "{{ 'It: ' ~ m.content }}", "{{ m.content | trim }}"])
def test_null_and_parts_are_not_written_as_python_writes_them(write):
    chat = ChatEncoder("{% for m in messages %}" + write + "{% endfor %}", "t", ByteTokenizer())
    with pytest.raises(ChatError, match="writes message 2's content, which is null, as the word None: leave it out"):
        chat.encode([{"role": "user", "content": "None"}, *CALLED[1:]])
    with pytest.raises(ChatError, match="writes message 1's content, a list, as Python writes it: make it text"):
        chat.encode([CALLED[0], CALLED[3]])
    assert text_and_learned(
        chat, [{"role": "user", "content": "None"}, {"role": "assistant", "content": "x", "name": None}]
    )


def test_contents_that_a_template_cannot_take_are_named():
    chat = ChatEncoder(
        "{% for m in messages %}{{ m.role + m.content.split('x')[0] }}{% endfor %}", "t", ByteTokenizer()
    )
    for n, messages in (2, CALLED[2:0:-1]), (1, CALLED):
        what = "null" if n == 2 else "a list"
        with pytest.raises(
            ChatError, match=f"refuses the messages: it takes text, and message {n}'s content is {what}"
        ):
            chat.encode(messages)
    nested = ChatEncoder(
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}", "t", ByteTokenizer()
    )
    with pytest.raises(ChatError, match=r"writes message 1's tool_calls\[0\].function.arguments, an object, as Python"):
        nested.encode([CALLED[1]])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "not a list of messages, or is empty"),
        ("hello", "not a list of messages"),
        ([{"content": "a"}], 'message 1 has no "role" that is a text: write {"role"'),
        ([{"role": "user", "content": "a"}], "the assistant says nothing"),
        (
            [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}],
            "message 1 has the role 'human', which the chat template does not name: use \"user\"",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            "the roles are 'user', 'system', and one has to be 'assistant'",
        ),
        ([{"role": "assistant", "content": "a\ufdd0"}], "not characters"),
        ([{"role": "assistant"}], "the chat template t refuses the messages: no content"),
    ],
)
def test_conversations_that_cannot_be_used(messages, says):
    template = "{% for m in messages %}{% if not m.content %}{{ raise_exception('no content') }}{% endif %}{% endfor %}"
    with pytest.raises(ChatError) as error:
        ChatEncoder(template, "t", ByteTokenizer()).encode(messages)
    assert says in str(error.value)


def test_roles_that_the_template_names_are_its_own():
    messages = [{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(ChatError, match="message 1 has the role 'critic'"):
        ChatEncoder(template, "t", ByteTokenizer()).encode(messages)
    named = template.replace("{{ m.content", "{{ '!' if m.role == 'critic' }}{{ m.content")
    tokens, _ = ChatEncoder(named, "t", ByteTokenizer()).encode(messages)
    assert bytes(tokens.tolist()) == b"<critic>!a<assistant>b"


def test_what_published_templates_use():
    """loop controls, tojson unescaped, the tokenizer's marks, no current date, blocks that leave no lines."""
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "{{ m | tojson }}{% endfor %}{% if strftime_now is defined %}today{% endif %}"
    )
    messages = [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "<é>"}]
    text, _ = text_and_learned(ChatEncoder(template, "t", ByteTokenizer()), messages)
    assert text == '{"role": "assistant", "content": "<é>"}'
    tokenizer = ByteTokenizer()
    tokenizer.special_tokens = {"bos_token": "<s>"}
    assert text_and_learned(ChatEncoder(template, "t", tokenizer), messages)[0] == f"<s>{text}"


def test_where_templates_come_from(bpe, tmp_path, monkeypatch):
    def why(template, name):
        with pytest.raises(ConfigError) as error:
            open_chat_encoder(template, open_tokenizer(name))
        return error.value.problems[0]

    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED)
    assert open_chat_encoder(str(file), ByteTokenizer()).template == MARKED
    assert open_chat_encoder("", open_tokenizer(str(bpe))).template == CHATML
    assert "the byte tokenizer has no chat template of its own" in why("", "bytes")
    refusal = why("", str(tmp_path))
    assert (
        "has no chat template (chat_template.jinja, or in tokenizer_config.json): copy one there, or name " in refusal
    )
    shipped = re.search(r"with data\.chat_template .* such as (.*), which is ChatML", refusal)[1]
    assert open_chat_encoder(shipped, ByteTokenizer()).has_generation_tags
    settings = '{"chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    assert open_chat_encoder("", open_tokenizer(str(tmp_path))).template == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert open_chat_encoder("", open_tokenizer(str(tmp_path))).template == "c"
    assert "No such file" in why("gone.jinja", "bytes")
    file.write_text("\n{% for %}")
    assert f"{file}:2: the chat template is not Jinja" in why(str(file), "bytes")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "need the package jinja2: pip install jinja2" in why("", str(tmp_path))


def test_weights_need_a_mark_for_each_assistant_message():
    twice = MARKED.replace(
        "{{ message.content }}<|im_end|>", "{{ message.content }}{% endgeneration %}{% generation %}!"
    )
    weighted = [*TALK[:2], TALK[2] | {"weight": 0.5}, *TALK[3:]]
    chat = ChatEncoder(twice, "t", ByteTokenizer())
    assert chat.encode(TALK)[1].max() == 1
    with pytest.raises(ChatError, match="marks 4 parts of 2 assistant messages: mark each of them once"):
        chat.encode(weighted)
    assert sorted({*ChatEncoder(MARKED, "t", ByteTokenizer()).encode(weighted)[1].tolist()}) == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% generation %}{% endgeneration %}{{ messages[0].content }}", "has to stand between"),
        (
            "{{ messages[0].content }}{% if false %}{% generation %}x{% endgeneration %}{% endif %}",
            "has to stand between",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "nothing that the assistant says"),
    ],
)
def test_a_template_that_leaves_no_token_to_learn_is_refused(template, says, bpe):
    with pytest.raises(ChatError, match=f"the chat template t .*{says}"):
        ChatEncoder(template, "t", open_tokenizer(str(bpe))).encode(TALK)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_prompt_has_the_ids_of_transformers(template, bpe):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    options = {"chat_template": template, "add_generation_prompt": True, "return_dict": True}
    talk = [*TALK, {"role": "user", "content": "And <|im_end|>?"}]
    ids = ChatEncoder(template, "t", open_tokenizer(str(bpe))).encode_prompt(talk).tolist()
    assert ids == theirs.apply_chat_template(talk, **options)["input_ids"]


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + CHATML
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "née", "parameters": {"type": "object"}}}]
CALLS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("marked", [False, True])
def test_tools_of_a_record_are_written_as_transformers_does(bpe, marked):
    from transformers import PreTrainedTokenizerFast

    template = WITH_TOOLS.replace(CHATML, MARKED) if marked else WITH_TOOLS
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>")
    options = dict(chat_template=template, tokenize=True, return_dict=True, tools=TOOLS)
    expected = theirs.apply_chat_template(CALLS, **options)["input_ids"]
    chat = ChatEncoder(template, "t", open_tokenizer(str(bpe)))
    for tools in (TOOLS, json.dumps(TOOLS)):
        tokens, weights = chat.encode(CALLS, tools)
        assert tokens.tolist() == expected and 0 < (weights > 0).sum() < 12
    without, _ = chat.encode(CALLS)  # nothing stays behind
    assert without.tolist() == chat.encode(CALLS, [])[0].tolist() == chat.encode(CALLS, "")[0].tolist() != expected


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [
        (
            CHATML,
            TOOLS,
            "the record has tools, and the chat template t does not write them: use one that does, or leave",
        ),
        (WITH_TOOLS, "[{", "'tools' is a text that is not JSON"),
        (WITH_TOOLS, {"name": "add"}, "'tools' is an object: write a list of JSON schemas"),
        (WITH_TOOLS, ["add"], "'tools' is a list: write a list of JSON schemas"),
    ],
)
def test_tools_that_would_be_lost_are_refused(template, tools, said):
    with pytest.raises(ChatError, match=re.escape(said)):
        ChatEncoder(template, "t", ByteTokenizer()).encode(CALLS, tools)


@pytest.mark.parametrize("format", ["chat", "preference"])
def test_tools_of_a_file_are_in_its_shards(format, tmp_path, capsys):
    record = {"messages": CALLS} if format == "chat" else {"prompt": CALLS[:1], "chosen": CALLS[1:], "rejected": WRONG}
    (tmp_path / "with.jsonl").write_text(json.dumps(record | {"tools": TOOLS}) + "\n" + json.dumps(record) + "\n")
    (tmp_path / "t.jinja").write_text(WITH_TOOLS)
    (tmp_path / "plain.jinja").write_text(CHATML)
    words = ["tokenize", str(tmp_path / "with.jsonl"), "--format", format, "--workers", "1", "--chat-template"]
    assert main([*words, str(tmp_path / "t.jinja"), "--out", str(tmp_path / "out")]) == 0
    documents = ShardDocuments(tmp_path / "out")
    lengths = np.diff(documents.starts[:]).tolist()
    each = len(lengths) // 2
    with_tools, without = lengths[:each], lengths[each:]
    added = len(f"<|im_start|>system\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n<|im_end|>\n".encode())
    assert with_tools == [length + added for length in without]
    assert main([*words, str(tmp_path / "plain.jinja"), "--out", str(tmp_path / "refused")]) == 2
    assert "with.jsonl:1: the record has tools, and the chat template" in capsys.readouterr().err


def test_shards_from_before_tools_were_read_are_not_taken_for_those_with_tools(tmp_path):
    (tmp_path / "t.jinja").write_text(WITH_TOOLS)
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": CALLS, "tools": TOOLS}) + "\n")
    job = TokenizeJob([str(tmp_path / "one.jsonl")], "", format="chat", chat_template=str(tmp_path / "t.jinja"))
    with pytest.MonkeyPatch.context() as before:
        before.setattr(FORMATS.look_up("chat"), "optional_fields", ())
        old = plan_shards(job).identity
    assert plan_shards(job).identity != old


WRONG = [{"role": "assistant", "content": "3"}]
