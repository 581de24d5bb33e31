"""Tokenizers: bytes, which need no vocabulary, or any Hugging Face tokenizer.json.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json

FILE, SETTINGS, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
OTHER_FILES = (
    *(SETTINGS, "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *(CHAT_TEMPLATE, "chat_template.json", "*.tiktoken", "tokenization_*.py"),
)
"""Patterns of other files of a tokenizer, which lie beside its tokenizer.json."""
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""Usual EOS tokens, looked for if tokenizer_config.json names none."""
CHUNK = 1 << 20
"""Characters that are encoded at a time: an encoding takes some hundred bytes per token."""


class EncodedWithOffsets(NamedTuple):
    """The token ids of a text, and the characters [begin, end) that each token stands for."""

    tokens_T: np.ndarray
    begin_T: np.ndarray
    end_T: np.ndarray


class ByteTokenizer:
    """The tokenizer of UTF-8 bytes: tokens 0-255 are bytes, and three more are BOS, EOS and padding."""

    bos, eos, pad = 256, 257, 258
    vocab_size = 259
    identity = "bytes"
    special_tokens: dict[str, str] = {}

    def files(self) -> dict[str, Path]:
        return {}

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_with_offsets(self, text: str) -> EncodedWithOffsets:
        (tokens_T,) = self.encode_all([text])
        begin_T = np.cumsum((tokens_T & 0xC0) != 0x80) - 1  # 10xxxxxx continues a character
        return EncodedWithOffsets(tokens_T, begin_T, begin_T + 1)

    def leading_special_token(self, text: str) -> int | None:
        return None

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Special tokens are left out; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def token_text(self, token: int) -> str:
        """Return the text of one token for people, special ones included. Bytes beyond ASCII are in hexadecimal."""
        return {self.bos: "<bos>", self.eos: "<eos>", self.pad: "<pad>"}.get(
            token, chr(token) if token < 128 else f"\\x{token:02x}"
        )

    def document(self, data: bytes) -> np.ndarray:
        """Return the tokens of a text file's bytes with BOS and EOS, as int16, to save memory."""
        return np.concatenate(([self.bos], np.frombuffer(data, np.uint8), [self.eos]), dtype=np.int16)


class JsonTokenizer:
    """A Hugging Face tokenizer, read from a tokenizer.json and the settings beside it.

    BOS is the token that the tokenizer puts before a text by itself. EOS is the one that tokenizer_config.json names,
    or that the tokenizer puts after a text, or the only usual one of its vocabulary.

    Raises:
        ConfigError: the file cannot be read, or no EOS can be told.
    """

    def __init__(self, file: Path):
        import tokenizers

        try:
            self._source = file.read_text(encoding="utf-8")
            self._with_special = tokenizers.Tokenizer.from_str(self._source)
            self._plain = tokenizers.Tokenizer.from_str(self._source)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}: check the path and its permissions") from None
        except Exception as error:  # the package has no exception class of its own
            raise ConfigError(f"{file} is not a tokenizer.json that tokenizers can read: {error}") from None
        for tokenizer in (self._plain, self._with_special):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        # A web page that holds "<|endoftext|>" as text must not end a document.
        self._plain.encode_special_tokens = True
        self.file = file
        self._settings = _read_settings(file.parent / SETTINGS)
        self.vocab_size = max(self._plain.get_vocab(with_added_tokens=True).values()) + 1
        before, after = self._surrounding_tokens()
        self.bos = self._token_id_of_setting("bos_token") if self._settings.get("add_bos_token") else before
        self.eos = self._find_end_token(after)
        self.special_tokens = {
            name: text for name in ("bos_token", "eos_token") if (text := _token_text(self._settings.get(name)))
        }
        self.special_tokens.setdefault("eos_token", self._plain.id_to_token(self.eos))
        if self.bos is not None:
            self.special_tokens.setdefault("bos_token", self._plain.id_to_token(self.bos))
        digest = hashlib.blake2b(self._source.encode(), digest_size=8).hexdigest()
        self.identity = f"{digest} bos {self.bos} eos {self.eos}"

    def files(self) -> dict[str, Path]:
        """Return the paths of all files of the tokenizer, by their names."""
        beside = {
            file.name: file for pattern in OTHER_FILES for file in self.file.parent.glob(pattern) if file.is_file()
        }
        return {FILE: self.file} | dict(sorted(beside.items()))

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's token ids, without BOS and EOS. Special tokens in a text are encoded as plain text.

        A text of more than CHUNK characters is encoded in chunks, at whose borders tokens may differ.
        """
        chunks = [(number, chunk) for number, text in enumerate(texts) for chunk in _split_long_text(text)]
        codes = self._plain.encode_batch_fast([chunk for _, chunk in chunks], add_special_tokens=False)
        chunks_of_text: list[list[np.ndarray]] = [[] for _ in texts]
        for (number, _), code in zip(chunks, codes, strict=True):
            chunks_of_text[number].append(np.array(code.ids, np.uint32))
        return [chunks[0] if len(chunks) == 1 else np.concatenate(chunks) for chunks in chunks_of_text]

    def encode_with_offsets(self, text: str) -> EncodedWithOffsets:
        """Return the tokens of a chat template's text with their characters. Special tokens in it are encoded as such.

        No BOS or EOS is added.
        """
        code = self._with_special.encode(text, add_special_tokens=False)
        offset_T2 = np.array(code.offsets, np.int64).reshape(-1, 2)
        return EncodedWithOffsets(np.array(code.ids, np.uint32), offset_T2[:, 0], offset_T2[:, 1])

    def leading_special_token(self, text: str) -> int | None:
        """Return the id of the special or added token that a text begins with; None if it begins with none."""
        ids = self._with_special.encode(text, add_special_tokens=False).ids
        added = self._plain.get_added_tokens_decoder()
        return ids[0] if ids and ids[0] in added and text.startswith(added[ids[0]].content) else None

    def decode(self, tokens: Iterable[int]) -> str:
        return self._plain.decode(list(tokens))

    def token_text(self, token: int) -> str:
        """Return the text of one token for people, special ones included; U+FFFD for a part of a character."""
        stored = self._plain.id_to_token(token) or ""
        # Decoders of SentencePiece leave out a space at the beginning, which these tokens write as U+2581.
        return stored if stored.startswith("\u2581") else self._plain.decode([token], skip_special_tokens=False)

    def _surrounding_tokens(self) -> tuple[int | None, int | None]:
        """Return the ids of the tokens, the first of several, that the tokenizer itself puts (before, after) a text."""
        plain = self._with_special.encode("a", add_special_tokens=False).ids
        ids = self._with_special.encode("a").ids
        at = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
        after = ids[at + len(plain) :]
        return ids[0] if at else None, after[0] if after else None

    def _token_id_of_setting(self, name: str) -> int:
        """Return the id of the token that a setting of tokenizer_config.json names, or raise a ConfigError."""
        text = _token_text(self._settings.get(name))
        token = None if text is None else self._plain.token_to_id(text)
        if token is None:
            where = self.file.parent / SETTINGS
            raise ConfigError(f"{where}: {name} is {text!r}, which is not a token of {self.file}")
        return token

    def _find_end_token(self, token_after_text: int | None) -> int:
        """Return the id of EOS; raise a ConfigError if no token, or more than one of END_TOKENS, could be it.

        `token_after_text` is the token that the tokenizer puts after a text; None if it puts none.
        """
        if self._settings.get("eos_token") is not None:
            return self._token_id_of_setting("eos_token")
        if token_after_text is not None:
            return token_after_text
        end_tokens = [token for text in END_TOKENS if (token := self._plain.token_to_id(text)) is not None]
        if len(end_tokens) != 1:
            many = "several tokens that could be it" if end_tokens else "no token with a usual name"
            raise ConfigError(
                f"{self.file} does not say which token ends a document, and has {many}: put a {SETTINGS} next to "
                'it that does, such as {"eos_token": "</s>"}'
            )
        return end_tokens[0]


Tokenizer = ByteTokenizer | JsonTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer by name: "bytes", a tokenizer.json, or the folder that holds one.

    Raises:
        ConfigError: there is no such file, or it cannot be read, or no EOS can be told.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {name!r}: there is no file {file.absolute()}: set data.tokenizer or --tokenizer to a {FILE}, "
            'its folder or "bytes"'
        )
    return JsonTokenizer(file)


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = parse_json(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _token_text(token: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json, a string or an object with its content; or None."""
    return token.get("content") if isinstance(token, dict) else token


def _split_long_text(text: str) -> Iterator[str]:
    """Yield chunks of a text of at most `CHUNK` characters, split after a line end before text where there is one."""
    at = 0
    while len(text) - at > CHUNK:
        end = at + CHUNK
        # Usual pre-tokenizers join nothing across a line end that text follows.
        while (end := text.rfind("\n", at, end)) > at and text[end + 1].isspace():
            pass
        end = end + 1 if end > at else at + CHUNK
        yield text[at:end]
        at = end
    yield text[at:]
