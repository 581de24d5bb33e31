"""`titanmoe data show`: its output of each kind of data, and its marks and counts against what the loader does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import world
from tests.data.shard_folders import make
from tests.data.test_long_chats import SEQ_LEN, SOME, chats, recipe, run, trained
from tests.parity import read
from tests.support.byte_pairs import CHATML, write_tokenizer
from titanmoe.cli import main
from titanmoe.config.schema import Config
from titanmoe.data import lengths
from titanmoe.data.describe_samples import describe_sample, find_places
from titanmoe.data.lengths import describe_lengths
from titanmoe.data.loader import Loader
from titanmoe.data.pack import BestFitPacker
from titanmoe.data.pack_chats import ChatPacker
from titanmoe.data.pack_preferences import PreferencePacker
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer
from titanmoe.tokens import IGNORE

LEGEND = "[learned] tokens are labels; each token has its id; -> is only a label, and no input\n\n"
OWN = {"data.source": "files", "model.vocab_size": 320, "training.global_batch_size": 1}
WITHOUT_VALIDATION = {"training.local_batch_size": 1, "validation.interval": 0, "validation.held_out": 0}


def write(file: Path, records: list[dict[str, object]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def shown(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, **changes: object) -> str:
    """Return what the command prints of the recipe `debug` with these changes, without the lines on tokenizing."""
    own = OWN | WITHOUT_VALIDATION | {"job.dump_folder": str(folder)}
    own |= {key.replace("__", "."): value for key, value in changes.items()}
    assert main(["data", "show", "debug", *words, *(f"--{path}={value}" for path, value in own.items())]) == 0
    out = capsys.readouterr().out
    assert out[out.index("[learned]") :].startswith(LEGEND)
    return out[out.index(LEGEND) + len(LEGEND) :].replace(f"{folder}/", "")


def test_chats_are_shown_with_what_is_learned_and_what_the_template_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [[("system", "Be brief."), ("user", "the fox?"), ("assistant", "the dog\n" * n)] for n in (1, 2, 9)]
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    tokenizer = {"data__tokenizer": write_tokenizer(tmp_path), "data__format": "chat"}
    paths = write(tmp_path / "chats.jsonl", records)
    assert shown(capsys, tmp_path, data__paths=paths, training__seq_len=48, data__long_chats="cut", **tokenizer) == (
        "sample 0 of the run, from chats.jsonl: 43 positions with 5 labels, then 5 of padding\n"
        "document 1: positions 0 to 42\n"
        "       0  <|im_start|>(1) s(85) y(91) s(85) t(86) e(71) m(79) \\n(201) B(36) e(71) ▁br(279) i(75) e(71) "
        "f(72)\n"
        "      14  .(16) <|im_end|>(2) \\n(201) <|im_start|>(1) u(87) s(85) er(270) \\n(201) the(260) ▁fox(264) ?(33)\n"
        "      25  <|im_end|>(2) \\n(201) <|im_start|>(1) a(67) s(85) s(85) i(75) s(85) t(86) a(67) n(80) t(86) "
        "\\n(201)\n"
        "      38  [the(260) ▁dog(289) \\n(201) <|im_end|>(2) \\n(201)]\n"
        "\n"
        "the chat template writes, around what the data has (...):\n"
        "    system     <|im_start|>system\\n...<|im_end|>\\n\n"
        "    user       <|im_start|>user\\n...<|im_end|>\\n\n"
        "    assistant  <|im_start|>assistant\\n...<|im_end|>\\n\n"
        "\n"
        f"chats.jsonl: chats.jsonl through tokenizer {str(tmp_path)!r}, 3 documents, 159 tokens\n"
        "lengths of all 3 chats, in positions:\n"
        f"           33 to        64          2  {'#' * 40}\n"
        f"           65 to       128          1  {'#' * 20}\n"
        "2 fit seq_len = 48, and 1 (33.3%) do not: 1 left out, 0 truncated after an assistant message "
        '(data.long_chats = "cut")\n'
        "seq_len = 67, 67 and 67 would keep 95, 99 and 100 % of all\n"
        "42 of 159 tokens (26.4%) are learned\n"
    )


PAIRS = [{"prompt": f"Q: {n} ", "chosen": "yes" * n, "rejected": "no"} for n in (1, 2, 30)]


def test_pairs_are_shown_with_both_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"data__format": "preference", "training__objective": "dpo", "training__seq_len": 24}
    paths = write(tmp_path / "pairs.jsonl", PAIRS)
    assert shown(capsys, tmp_path, data__paths=paths, **own) == (
        "sample 0 of the run, from pairs.jsonl: 20 positions with 10 labels, then 4 of padding\n"
        "pair 2, chosen: positions 0 to 11\n"
        "       0  <bos>(256) Q(81) :(58) ▁(32) 2(50) ▁(32) [y(121) e(101) s(115) y(121) e(101) s(115) -> <eos>(257)]\n"
        "pair 2, rejected: positions 0 to 7\n"
        "       0  <bos>(256) Q(81) :(58) ▁(32) 2(50) ▁(32) [n(110) o(111) -> <eos>(257)]\n"
        "\n"
        "pairs.jsonl: pairs.jsonl through tokenizer 'bytes', 6 documents, 149 tokens\n"
        "lengths of all 3 pairs, in positions:\n"
        f"           17 to        32          2  {'#' * 40}\n"
        "           33 to        64          0\n"
        f"           65 to       128          1  {'#' * 20}\n"
        "2 fit seq_len = 24, and 1 (33.3%) do not: 0 left out, 1 with a truncated completion\n"
        "seq_len = 106, 106 and 106 would keep 95, 99 and 100 % of all\n"
        "111 of 149 tokens (74.5%) are learned\n"
    )
    assert (
        "pair 2, prompt of both: positions 0 to 4\n"
        "       0  <bos>(256) Q(81) :(58) ▁(32) 2(50)\n"
        "pair 2, chosen: positions 5 to 11\n"
        "       5  ▁(32) [y(121) e(101) s(115) y(121) e(101) s(115) -> <eos>(257)]\n"
        "pair 2, rejected: positions 5 to 7\n"
        "       5  ▁(32) [n(110) o(111) -> <eos>(257)]\n"
    ) in shown(capsys, tmp_path, "--sample", "3", data__paths=paths, data__share_prefixes="true", **own)


def test_text_is_shown_with_where_documents_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"data__paths": write(tmp_path / "a.jsonl", [{"text": "é\x1b"}, {"text": "b c"}]), "training__seq_len": 9}
    tail = (
        "\n"
        "a.jsonl: a.jsonl through tokenizer 'bytes', 2 documents, 10 tokens\n"
        "lengths of all 2 documents, in positions:\n"
        f"            3 to         4          2  {'#' * 40}\n"
        "2 fit seq_len = 9, and 0 (0.0%) do not\n"
        "seq_len = 4, 4 and 4 would keep 95, 99 and 100 % of all\n"
        "10 of 10 tokens (100.0%) are learned\n"
    )
    first, second = r"<bos>(256) [\xc3(195) \xa9(169) \x1b(27)", "b(98) ▁(32) c(99) -> <eos>(257)]"
    assert shown(capsys, tmp_path, data__packing="best_fit", **own) == (
        "sample 0 of the run, from a.jsonl: 8 positions with 8 labels, then 1 of padding\n"
        f"document 1: positions 0 to 3\n       0  {first} -> <eos>(257)]\n"
        f"document 2: positions 0 to 3\n       0  <bos>(256) [{second}\n{tail}"
    )
    assert shown(capsys, tmp_path, data__packing="stream", **own) == (
        "sample 0 of the run, from a.jsonl: 9 positions with 9 labels\n"
        f"document 1: positions 0 to 4\n       0  {first} <eos>(257)]\n"
        f"document 2: positions 5 to 8\n       5  [<bos>(256) {second}\n{tail}"
    )
    assert shown(capsys, tmp_path, data__packing="documents", **own) == (
        "sample 0 of the run, from a.jsonl: 9 positions with 8 labels\n"
        f"document 1: positions 0 to 4\n       0  {first} <eos>(257)]\n"
        f"document 2: positions 0 to 3\n       0  <bos>(256) [{second}\n{tail}"
    )


def test_token_shards_without_their_tokenizer_are_shown_as_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "shards", [[[5, 6, 0], [7, 0]], [[8, 9, 4, 0]]])
    own = {"data__paths": folder, "training__seq_len": 6, "data__packing": "best_fit", "model__vocab_size": 1024}
    text = shown(capsys, tmp_path, **own)
    assert text.startswith(
        "sample 0 of the run, from shards: 6 positions with 6 labels\n"
        "document 3: positions 0 to 2\n       0  8 [9 4 -> 0]\n"
        "document 1: positions 0 to 1\n       0  5 [6 -> 0]\n"
        "document 2: positions 0 to 0\n       0  7 [-> 0]\n"
    )
    assert "lengths of all 3 documents" in text
    monkeypatch.setattr(lengths, "MEASURED", 2)
    text = shown(capsys, tmp_path, **own)
    assert "lengths of the first 2 of 3 documents" in text and "5 of 5 tokens (100.0%) are learned" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"data.format": "chat", "training.seq_len": 144},
        {"data.format": "chat", "training.seq_len": 144, "data.packing": "documents"},
        {"data.format": "chat", "training.seq_len": 144, "data.packing": "stream"},
        {"data.format": "preference", "training.objective": "dpo", "training.seq_len": 48},
    ],
    ids=lambda changes: f"{changes['data.format']} {changes.get('data.packing', '')}",
)
def test_marks_are_the_labels_of_the_batch(changes: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    talks = [["Why?", "y" * n, "How?", "z" * n] for n in range(1, 9)]
    records = [
        {"messages": [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(talk)]}
        for talk in talks
    ]
    file = write(tmp_path / "data.jsonl", records if changes["data.format"] == "chat" else PAIRS)
    own = {"data.paths": [file], "job.dump_folder": str(tmp_path), "data.chat_template": str(tmp_path / "chatml.jinja")}
    config: Config = read(OWN | own | changes, 1)
    loader = Loader(config, 0, 1)
    samples = loader.mix.take(0, 6)
    batch = loader.layout.read(loader.mix, samples)
    for n, sample in enumerate(samples):
        for places in (None, find_places(loader.mix, sample)):
            rows = describe_sample(batch, n, None, ("{", "}"), places)
            marked = re.findall(r"\d+", " ".join(span for row in rows for span in re.findall("{(.*?)}", row)))
            assert [*map(int, marked)] == batch.labels_BS[n][batch.labels_BS[n] != IGNORE].tolist()


def test_a_run_on_chats_writes_its_first_sample_once(tmp_path: Path) -> None:
    config, file = recipe(tmp_path, [3, 90], training__steps=1, job__name="some"), tmp_path / "some/first_sample.txt"
    assert world.run(1, run, config, Loader) == [""]
    loader = Loader(config, 0, 1)
    text, (labels,) = file.read_text(encoding="utf-8"), loader.peek()[0].labels_BS
    assert text.startswith(LEGEND) and f"with {(labels != IGNORE).sum()} labels" in text
    assert " [y(121) y(121) y(121)" in text and "\\n(10)" in text
    file.unlink()
    more = recipe(tmp_path, [3, 90], training__steps=2, job__name="some")
    assert world.run(1, run, more, Loader) == [""] and not file.exists()  # the run goes on
    paths = [write(tmp_path / "text.jsonl", [{"text": "abc"}] * 99)]
    plain = {"data__format": "auto", "data__chat_template": "", "data__paths": paths, "job__name": "text"}
    assert world.run(1, run, recipe(tmp_path, [3], training__steps=1, **plain), Loader) == [""]
    assert (tmp_path / "text/config.toml").exists() and not (tmp_path / "text/first_sample.txt").exists()


@pytest.mark.parametrize("policy", ["drop", "cut"])
def test_counts_of_chats_are_what_an_epoch_has(policy: str) -> None:
    packer = ChatPacker(SOME, SEQ_LEN, 0, policy)
    length, kept = packer.needed_lengths(len(SOME)), {n: size for n, (size, _) in trained(packer).items()}
    cut = sum(size < length[n] for n, size in kept.items())
    line = next(line for line in describe_lengths(packer) if "fit seq_len" in line)
    assert line == (
        f"2 fit seq_len = 20, and 3 (60.0%) do not: {len(SOME) - len(kept)} left out, {cut} truncated after "
        f'an assistant message (data.long_chats = "{policy}")'
    )


def test_counts_of_pairs_are_those_of_the_header(tmp_path: Path) -> None:
    prompts = ("Q", "Q" * 60, "Q" * 2)
    records = [{"prompt": prompt, "chosen": "yes" * 9, "rejected": "no"} for prompt in prompts]
    own = {"data.format": "preference", "training.objective": "dpo", "training.seq_len": 34}
    own |= {"data.paths": [write(tmp_path / "pairs.jsonl", records)], "job.dump_folder": str(tmp_path)}
    packer = Loader(read(OWN | own, 1), 0, 1).mix.sources[0].packer
    assert isinstance(packer, PreferencePacker) and (packer.num_left_out, packer.num_truncated) == (1, 1)
    assert "1 fit seq_len = 34, and 2 (66.7%) do not: 1 left out, 1 with a truncated completion" in describe_lengths(
        packer
    )


def test_the_histogram_has_every_document() -> None:
    sizes = [*range(1, 70)]
    packer = BestFitPacker(chats(*[(size, 0) for size in sizes]), SEQ_LEN, 0)
    found = re.findall(r"^ +([\d,]+) to +([\d,]+) +(\d+)  #", "\n".join(describe_lengths(packer)), re.MULTILINE)
    rows = [tuple(map(int, row)) for row in found]
    assert [row[2] for row in rows] == [sum(first <= size <= last for size in sizes) for first, last, _ in rows]
    assert rows[-1][:2] == (65, 128) and len(rows) == 8


def test_text_of_single_tokens(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    assert [tokenizer.token_text(token) for token in (65, 195, 256, 257, 258)] == [
        "A",
        r"\xc3",
        "<bos>",
        "<eos>",
        "<pad>",
    ]
    own = open_tokenizer(str(write_tokenizer(tmp_path)))
    tokens = own.encode_with_offsets("<|im_start|>the fox\n").tokens_T
    assert [own.token_text(token) for token in tokens.tolist()] == ["<|im_start|>", "the", " fox", "\n"]
    assert own.token_text(5000) == ""


def test_a_terminal_gets_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "shards", [[[5, 6, 0]]])
    words = [f"--{path}={value}" for path, value in (OWN | WITHOUT_VALIDATION).items()]
    words += ["--data.paths", str(folder), "--training.seq_len=2", "--model.vocab_size=1024"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["data", "show", "debug", *words]) == 0
    assert "  5 \x1b[32m6 -> 0\x1b[0m\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "command line: which recipe? For example: titanmoe data show sft_debug"),
        (["debug", "--sample", "0"], "--sample = 0 is not a number of samples"),
        (["debug", "--data.source", "files", "--data.paths", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["debug", "--data.sauce", "files"], "unknown option --data.sauce"),
    ],
)
def test_what_it_refuses(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", *words]) == 2
    assert says in capsys.readouterr().err
