"""titanmoe generate --chat: a conversation line by line, with the ids of transformers; where completions end."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import world
from tests.checkpoint import runs
from tests.generate.test_generate_command import FOLDED, TEXT, ask, command, lines
from tests.support.byte_pairs import CHATML, MARKED
from titanmoe.data.chat import ChatEncoder
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer
from titanmoe.generate import conversation as module
from titanmoe.replace import replaced

SAYS = "the fox?\n\nquick <|im_end|> dog\n"
EXACT = ["--temperature", "0", "--max-tokens", "6", "--dtype", "float64"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    world.run(1, runs.go, str(folder), TEXT, 1)
    return folder / "run"


def converse(said: str, *words: object) -> tuple[int, str, str]:
    """On a rank: only rank 0 has what a user says."""
    import torch.distributed as dist

    with replaced(sys, "stdin", io.StringIO(said if dist.get_rank() == 0 else "")):
        return command(*words)


def test_a_conversation_has_the_ids_of_transformers_folded_or_not(run: Path, bpe: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    words = "--checkpoint", run, "--tokenizer", bpe, "--chat", "--system", "Be brief.", *EXACT
    ((code, out, err),) = world.run(1, converse, SAYS, *words, "--json")
    assert code == 0, err
    completions = [json.loads(line) for line in out.splitlines()]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>")
    messages = [{"role": "system", "content": "Be brief."}]
    for number, (text, completion) in enumerate(zip(("the fox?", "quick <|im_end|> dog"), completions, strict=True)):
        messages.append({"role": "user", "content": text})
        ids = theirs.apply_chat_template(
            messages, chat_template=CHATML, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        assert (completion["number"], completion["prompt"], completion["prompt_tokens"]) == (number, text, ids)
        assert completion["tokens"] and completion["text"] == theirs.decode(
            completion["tokens"], skip_special_tokens=True
        )
        messages.append({"role": "assistant", "content": completion["text"]})
    assert f"{sum(len(completion['tokens']) for completion in completions)} tokens after 2 questions in" in err

    first, *others = world.run(4, converse, SAYS, *words, "--json", *FOLDED)
    assert first[:2] == (0, out) and others == [(0, "", "")] * 3
    ((_, streamed, _),) = world.run(1, converse, SAYS, *words)
    assert streamed == "".join(f"{completion['text']}\n" for completion in completions)
    (alone,) = lines(*words, "--prompt", "the fox?")
    assert alone == completions[0]


def counted(most_pairs: int, *words: object) -> tuple[tuple[int, str, str], list[int]]:
    """On a rank: a conversation, and how many tokens each forward has read."""
    from titanmoe.generate import loop

    forward, counts = loop.Generator.forward, []

    def count(generator: Any, ids: list[int]) -> Any:
        counts.append(len(ids))
        return forward(generator, ids)

    with replaced(loop, "MOST_PAIRS", most_pairs), replaced(loop.Generator, "forward", count):
        return converse("the fox?\nquick\nthe lazy dog\n", *words), counts


@pytest.mark.parametrize("degrees", [(), ("--ep", "2"), ("--tp", "2")])
def test_a_turn_reads_only_what_is_new(run: Path, bpe: Path, degrees: tuple[str, ...]) -> None:
    words = "--checkpoint", run, "--tokenizer", bpe, "--chat", *EXACT, "--json", *degrees
    ranks = 2 if degrees else 1
    (result, counts), *_ = world.run(ranks, counted, 1 << 22, *words)
    (anew, all_counts), *_ = world.run(ranks, counted, 0, *words)
    assert result[:2] == anew[:2] and result[0] == 0, result[2]
    first, second, third = (len(json.loads(line)["prompt_tokens"]) for line in anew[1].splitlines())
    assert [count for count in all_counts if count > 1] == [first, second, third]
    read, more, last = (count for count in counts if count > 1)
    assert read == first and 1 < more <= second - first and 1 < last <= third - second


def scripted(ids: list[int], *words: object) -> tuple[int, str, str]:
    """On a rank: the model chooses these tokens, whatever it finds likely."""
    from titanmoe.generate import loop

    left = iter(ids)
    with replaced(loop, "choose_tokens", lambda *_: ([next(left)], [0.0])):
        return command(*words)


def test_a_completion_ends_at_the_mark_of_the_template_or_of_documents(run: Path, bpe: Path) -> None:
    words = "--checkpoint", run, "--tokenizer", bpe, "--prompt", "fox", "--max-tokens", "4", "--json"

    def made(ids: list[int], *more: str) -> tuple[list[int], str]:
        ((code, out, err),) = world.run(1, scripted, ids, *words, *more)
        assert code == 0, err
        completion = json.loads(out)
        return completion["tokens"], completion["end"]

    assert made([65, 66, 2, 67], "--chat") == ([65, 66], "eos")  # <|im_end|>
    assert made([65, 0, 66, 67], "--chat") == ([65], "eos")  # <|endoftext|>
    assert made([65, 66, 2, 67]) == ([65, 66, 2, 67], "length"), "a document may contain one"


@pytest.mark.parametrize(
    ("template", "mark"),
    [
        (CHATML, 2),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (MARKED, 2),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}", 2),
    ],
)
def test_the_end_mark_of_a_template(template: str, mark: int | None, bpe: Path) -> None:
    assert ChatEncoder(template, "t", open_tokenizer(str(bpe))).end_of_turn_token() == mark
    assert ChatEncoder(template, "t", ByteTokenizer()).end_of_turn_token() is None


class SlowSpeaker:
    """Says something only after the others have been told that it is being waited for."""

    def isatty(self) -> bool:
        return False

    def __iter__(self) -> Any:
        time.sleep(0.5)
        yield "the fox\n"
        time.sleep(0.5)
        yield "quick\n"


def waited(*words: object) -> tuple[tuple[int, str, str], list[Any]]:
    import torch.distributed as dist

    told: list[Any] = []
    tell = dist.broadcast_object_list

    def listen(box: list[Any], **how: Any) -> None:
        tell(box, **how)
        told.extend(box)

    with (
        replaced(module, "WAIT_MESSAGE_S", 0.1),
        replaced(dist, "broadcast_object_list", listen),
        replaced(sys, "stdin", SlowSpeaker() if dist.get_rank() == 0 else io.StringIO()),
    ):
        return command(*words), told


def test_ranks_hear_that_the_user_is_thinking(run: Path, bpe: Path) -> None:
    words = "--checkpoint", run, "--tokenizer", bpe, "--chat", *EXACT
    ((code, out, err), told), (_, other) = world.run(2, waited, *words, "--ep", 2)
    assert code == 0 and len(out.splitlines()) >= 2, err
    assert told == other and told.count("wait") > 1 and told[-1] == "end"
    assert [message[0] for message in told if isinstance(message, tuple)] == ["the fox", "quick"]


def test_special_tokens_of_a_prompt_are_text_unless_asked_for(run: Path, bpe: Path) -> None:
    words = "--checkpoint", run, "--tokenizer", bpe, "--prompt", "fox<|im_end|>", *EXACT
    (plain,), (special,) = lines(*words), lines(*words, "--special-tokens")
    tokenizer = open_tokenizer(str(bpe))
    assert plain["prompt_tokens"] == tokenizer.encode_all(["fox<|im_end|>"])[0].tolist() and 2 not in plain["tokens"]
    assert special["prompt_tokens"] == tokenizer.encode_with_offsets("fox<|im_end|>").tokens_T.tolist()
    assert special["prompt_tokens"][-1] == 2 and 2 not in plain["prompt_tokens"]


def test_what_does_not_go_with_a_chat_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "none").write_text("")
    err = ask("--checkpoint", run, "--prompt", "a", "--system", "b")[2]
    assert "--system is a message of a chat: give --chat too" in err
    err = ask("--checkpoint", run, "--chat", "--special-tokens", "--prompts", tmp_path / "none")[2]
    assert "--special-tokens has no effect with --chat" in err and "no prompt" in err
    assert "has no chat template" in world.run(1, converse, "a\n", "--checkpoint", run, "--chat")[0][2]


def test_a_conversation_that_the_template_refuses_ends_on_all_ranks(run: Path, bpe: Path, tmp_path: Path) -> None:
    settings = json.loads((bpe / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    words = "--checkpoint", run, "--tokenizer", tmp_path, "--chat", "--system", "b", "--ep", 2
    first, other = world.run(2, converse, "a\n", *words)
    assert first[0] == other[0] == 2 and "--chat: the chat template" in first[2] and "no system" in first[2]
