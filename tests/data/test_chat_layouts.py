"""Chats in every layout that published data sets use: the same tokens and labels as messages, and mistakes named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from titanmoe.config import ConfigError
from titanmoe.data.chat_layouts import layout_of, read_chat
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenize import check_first_records, plan_shards, tokenize
from titanmoe.data.tokenize_command import summarize
from titanmoe.data.tokenize_unit import TokenizeJob

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}.{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?\n\nAt night."},
    {"role": "assistant", "content": "The fox"},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Why?\n\nAt night."},
    {"from": "gpt", "value": "The fox"},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES, "prompt": "Why?"},
    "messages as JSON": {"messages": json.dumps(MESSAGES)},
    "ShareGPT": {"conversations": SHAREGPT, "id": 7},
    "ShareGPT with a system column": {"system": "Be brief.", "conversations": SHAREGPT[1:]},
    "conversations in the usual names": {"conversations": MESSAGES},
    "Alpaca": {"instruction": "Why?", "input": "At night.", "output": "The fox", "system": "Be brief."},
    "Alpaca in one": {"instruction": "Why?\n\nAt night.", "input": "", "output": "The fox", "system": "Be brief."},
    "prompt and completion": {"prompt": "Why?\n\nAt night.", "completion": "The fox", "system": "Be brief."},
    "prompt and completion of messages": {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
    "prompt and completion as JSON": {"prompt": json.dumps(MESSAGES[:2]), "completion": json.dumps(MESSAGES[2:])},
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def expected(template: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[bool]]:
    """Tokens and labels of MESSAGES."""
    folder = tmp_path_factory.mktemp("expected")
    return shards(write(folder / "m.jsonl", [{"messages": MESSAGES}]), template, folder / "out")[:2]


def write(file: Path, records: list[dict[str, Any]]) -> str:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def shards(file: str | list[str], template: str, out: Path, **options: Any) -> tuple[list[int], list[bool], list[str]]:
    """Return tokens, labels, and what the command prints."""
    files = [file] if isinstance(file, str) else file
    job = TokenizeJob(files, str(out), format="chat", chat_template=template, **options)
    plan = plan_shards(job)
    check_first_records(plan)
    manifest = tokenize(plan, 1, log=lambda line: None)
    documents = ShardDocuments(out)
    span = 0, int(documents.starts[len(documents)])
    return documents.read(*span).tolist(), documents.label_mask(*span).tolist(), summarize(str(out), manifest)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_content_is_learned_equally_in_every_layout(
    name: str, expected: tuple[list[int], list[bool]], template: str, tmp_path: Path
) -> None:
    """Lines of JSON and rows of Parquet."""
    files = [write(tmp_path / f"x.{extension}", [LAYOUTS[name]] * 2) for extension in ("jsonl", "parquet")]
    tokens, labels, said = shards(files, template, tmp_path / "got")
    assert (tokens, labels) == (expected[0] * 4, expected[1] * 4) and sum(labels) == 4 * len("The fox.")
    assert len([line for line in said if "chats from the fields" in line]) == (not name.startswith("messages"))


def test_the_user_may_name_the_layout(template: str, tmp_path: Path) -> None:
    """A record that has messages and Alpaca's fields, with other words."""
    record = {"messages": MESSAGES, "instruction": "Who?", "output": "A cat"}
    file = write(tmp_path / "x.jsonl", [record])
    for field, learned in (("text", "The fox."), ("instruction", "A cat."), ("messages", "The fox.")):
        tokens, labels, _ = shards(file, template, tmp_path / field, field=field)
        assert bytes(np.array(tokens)[labels].tolist()).decode() == learned


def test_tools_and_calls_reach_the_template(template: str, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"name": "add", "arguments": {"a": 1}}
    usual = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    sharegpt = [
        {"from": "human", "value": "1 + 2?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3"},
    ]
    expected = shards(
        write(tmp_path / "m.jsonl", [{"messages": usual, "tools": tools}]), template, tmp_path / "expected"
    )
    as_text = [message | {"tool_calls": json.dumps(message.get("tool_calls", []))} for message in usual]
    as_text[2]["tool_calls"] = ""
    for number, record in enumerate(
        (
            {"conversations": sharegpt, "tools": tools},
            {"conversations": sharegpt, "tools": json.dumps(tools)},
            {"messages": as_text, "tools": tools},
            {"messages": json.dumps(as_text), "tools": json.dumps(tools)},
            {"prompt": as_text[:3], "completion": as_text[3:], "tools": tools},
        )
    ):
        file = write(tmp_path / f"{number}.jsonl", [record])
        tokens, labels, _ = shards(file, template, tmp_path / f"{number}")
        assert tokens == expected[0]
        assert labels == expected[1] or "prompt" in record, "the call is not learned as part of the prompt"
    assert b'add({"a": 1})' in bytes(token for token in expected[0] if token < 256)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "a", "output": " "}, "'output' is missing or empty"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": []}, "'completion' is missing or empty"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, "message 2 is empty"),
        ({"messages": None}, "has no 'messages', or null; of the fields that chats are read from it has none"),
        ({"prompt": "a", "completion": ""}, "'completion' is missing or empty"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "write both as one or the other"),
        ({"prompt": 7, "completion": "b"}, "'prompt' is a number: write a text"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "message 1 is from 'narrator': use one of"),
        (
            {"conversations": [{"from": "function_call", "value": "add 1"}]},
            "message 1 calls a tool, but not in JSON: write",
        ),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "message 1 has the role 'bot', which the chat template does not name: use one of user, assistant, tool, "
            "system, developer",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "add 1"}]},
            "message 1's tool_calls are a text that is not a list of calls in JSON",
        ),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "[]"}]}, "message 1 is empty"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": ""}]},
            "message 2 is empty, so there is nothing to learn from",
        ),
        ({"conversations": [{"from": "human", "value": "a"}]}, "the assistant says nothing, so"),
        ({"messages": "hello"}, "'messages' is a text that is not a list of messages in JSON: write"),
    ],
)
def test_what_is_no_chat_is_named_before_any_work(
    record: dict[str, Any], message: str, template: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "x.jsonl", [record])
    with pytest.raises(ConfigError) as error:
        check_first_records(plan_shards(TokenizeJob([file], "", format="chat", chat_template=template)))
    assert message in str(error.value) and "x.jsonl:1" in str(error.value)


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"text": "a", "id": 1}, 'set format = "auto" in [data] (--format auto) to learn all of its text'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 'set format = "preference" in [data] (--format preference)'),
        ({"id": 1, "dialog": SHAREGPT}, 'set field = "dialog" in [data] (--field dialog)'),
        ({"instruction": "a", "response": "b", "category": "c"}, "rename its fields to those of a layout"),
    ],
)
@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_a_file_without_chats_gets_its_fields_the_layouts_and_the_line_to_add(
    record: dict[str, Any], advice: str, extension: str, template: str, tmp_path: Path
) -> None:
    file = write(tmp_path / f"x.{extension}", [record])
    with pytest.raises(ConfigError) as error:
        check_first_records(plan_shards(TokenizeJob([file], "", format="chat", chat_template=template)))
    fields = ", ".join(map(repr, record))
    wanted = "messages; conversations; instruction and output; prompt and completion"
    place = f"{file}:1" if extension == "jsonl" else file
    expected = f"{place}: has no field 'messages', it has {fields}, and chats have {wanted}: {advice}"
    assert error.value.problems[0].removesuffix(' (correct it, or skip such records: bad_lines = "skip")') == expected


def test_a_field_with_messages_as_json_is_told(template: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"dialog": json.dumps(MESSAGES), "text": "a"}])
    with pytest.raises(ConfigError, match=r'set field = "dialog" in \[data\]'):
        check_first_records(plan_shards(TokenizeJob([file], "", format="chat", chat_template=template)))
    shards(file, template, tmp_path / "out", field="dialog")


def test_chats_given_as_text_are_told_their_format(tmp_path: Path) -> None:
    for name in ("ShareGPT", "Alpaca", "prompt and completion"):
        file = write(tmp_path / "x.jsonl", [LAYOUTS[name]])
        with pytest.raises(ConfigError, match="read it with --format chat"):
            check_first_records(plan_shards(TokenizeJob([file], "", format="jsonl")))


def test_nulls_are_absent() -> None:
    """Parquet fills missing fields with nulls."""
    record = {"messages": None, "instruction": "Why?", "input": None, "output": "The fox", "tools": None}
    messages, tools = read_chat(record)
    assert [message["content"] for message in messages] == ["Why?", "The fox"] and tools is None
    assert layout_of(record) == "instruction"
