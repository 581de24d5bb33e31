import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanmoe.config import ConfigError
from titanmoe.data import tokenizer as tokenizer_module
from titanmoe.data.tokenizer import ByteTokenizer, open_tokenizer


@given(st.text())
def test_text_comes_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode_all([text])[0]) == text


@given(st.binary(max_size=300))
def test_a_document_is_its_bytes_between_marks(data):
    tokens = ByteTokenizer().document(data).tolist()
    assert tokens == [256, *data, 257]


def test_marks_and_broken_utf8_decode_to_something_readable():
    assert ByteTokenizer().decode([256, *"é".encode()[:1], *b"ab", 257, 258]) == "\ufffdab"


def test_a_tokenizer_json_gives_back_what_it_read(bpe):
    tokenizer = open_tokenizer(str(bpe))
    texts = ["the quick fox", "", "nötig 日本\n\nthe dog"]
    assert [tokenizer.decode(row) for row in tokenizer.encode_all(texts)] == texts
    assert tokenizer.vocab_size == 1 + max(json.loads((bpe / "tokenizer.json").read_text())["model"]["vocab"].values())
    assert open_tokenizer(str(bpe / "tokenizer.json")).identity == tokenizer.identity


def test_a_mark_written_in_a_text_is_text_and_in_a_template_a_mark(bpe):
    tokenizer = open_tokenizer(str(bpe))
    text = "a<|endoftext|>b"
    assert tokenizer.eos not in tokenizer.encode_all([text])[0]
    tokens, begins, ends = tokenizer.encode_with_offsets(text)
    at = tokens.tolist().index(tokenizer.eos)
    assert (begins[at], ends[at]) == (1, 14)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_token_knows_its_characters(kind, bpe):
    tokenizer = open_tokenizer("bytes" if kind == "bytes" else str(bpe))
    text = "ab é日😀 the fox"
    tokens, begins, ends = tokenizer.encode_with_offsets(text)
    assert len(tokens) == len(begins) == len(ends) and begins[0] == 0 and ends[-1] == len(text)
    for a, b in zip(begins, ends, strict=True):
        inside = tokens[(begins >= a) & (ends <= b)]
        assert tokenizer.decode(inside.tolist()).strip() in text


def test_long_texts_are_cut_between_tokens(bpe, monkeypatch):
    tokenizer = open_tokenizer(str(bpe))
    text = "the fox\n\n  said the\nlazy dog\n" * 20 + "no line ends here at all" * 3
    whole = tokenizer.encode_all([text])[0]
    assert text == "".join(tokenizer_module._split_long_text(text))
    monkeypatch.setattr(tokenizer_module, "CHUNK", 50)
    assert len(list(tokenizer_module._split_long_text(text))) > 10
    assert "".join(tokenizer_module._split_long_text(text)) == text
    cut = tokenizer.encode_all([text[:580], text])
    assert cut[0].tolist() == whole[: len(cut[0])].tolist()
    assert tokenizer.decode(cut[1]) == text


def change(folder, to, tokenizer=None, **settings):
    to.mkdir()
    content = json.loads((folder / "tokenizer.json").read_text()) | (tokenizer or {})
    (to / "tokenizer.json").write_text(json.dumps(content))
    if settings:
        (to / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(to)


def test_marks_of_documents(bpe, tmp_path):
    """The end mark as named, or with a usual name; the begin mark only if the tokenizer adds one."""
    assert open_tokenizer(str(bpe)).bos is None and open_tokenizer(str(bpe)).eos == 0
    assert open_tokenizer(change(bpe, tmp_path / "a")).eos == 0
    assert open_tokenizer(change(bpe, tmp_path / "b", eos_token="<|im_end|>")).eos == 2
    named = open_tokenizer(change(bpe, tmp_path / "c", add_bos_token=True, bos_token="<|im_start|>"))
    assert (named.bos, named.eos) == (1, 0)
    special = {
        name: {"id": name, "ids": [n], "tokens": [name]} for n, name in enumerate(["<|endoftext|>", "<|im_start|>"])
    }
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": special}
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    before = open_tokenizer(change(bpe, tmp_path / "d", {"post_processor": template | {"single": single}}))
    assert (before.bos, before.eos) == (1, 0)
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
    after = open_tokenizer(change(bpe, tmp_path / "e", {"post_processor": template | {"single": single}}))
    assert (after.bos, after.eos) == (None, 0)


def test_tokenizers_that_cannot_be_used_say_why(bpe, tmp_path):
    def why(name: str) -> str:
        with pytest.raises(ConfigError) as error:
            open_tokenizer(name)
        return error.value.problems[0]

    assert "there is no file" in why(str(tmp_path / "gone"))
    (tmp_path / "broken.json").write_text('{"a": 1}')
    assert "broken.json is not a tokenizer.json" in why(str(tmp_path / "broken.json"))
    assert "'<x>', which is not a token" in why(change(bpe, tmp_path / "a", eos_token="<x>"))
    vocab = json.loads((bpe / "tokenizer.json").read_text())
    vocab["added_tokens"] = [mark | {"content": mark["content"][2:]} for mark in vocab["added_tokens"]]
    vocab["model"]["vocab"] = {key.removeprefix("<|"): n for key, n in vocab["model"]["vocab"].items()}
    assert "which token ends a document, and has no token" in why(change(bpe, tmp_path / "b", vocab))
