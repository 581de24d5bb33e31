"""Token shards: a folder of flat files and a manifest, memory-mapped by a run.

manifest.json      contents of the folder, with the length and checksum of every file; written last
NAME.tokens        tokens, document after document, uint16 or uint32, little-endian
NAME.starts        uint64, documents + 1: document i is tokens starts[i]:starts[i + 1] of the shard
NAME.counted       for chats: a byte per token, 1 where the token counts towards the loss as a label
NAME.weights       for chats whose labels are weighted: float32, how much each token counts as a label
NAME.sums          uint32: the CRC-32 of every 64 KiB of the files above; not in older folders
titanmoe.data.write_token_shards writes them; beside lie tokenizer/ and scores/. Shapes: N documents looked up.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.data.checked_file import BLOCK, CheckedFile
from titanmoe.data.documents import Documents, split_by_shard
from titanmoe.data.formats.format import completions_in_manifest
from titanmoe.data.tokenizer import FILE, OTHER_FILES, Tokenizer, open_tokenizer

MANIFEST, WORK, TOKENIZER = "manifest.json", "work", "tokenizer"
FORMAT, VERSION = "titanmoe token shards", 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
WEIGHTS = np.dtype("<f4")
OTHER_DTYPES = {"starts": np.dtype("<u8"), "counted": np.dtype(bool), "weights": WEIGHTS, "sums": np.dtype("<u4")}
"""Dtypes of the files other than tokens, by extension."""
MAKE, REMAKE = "make them with titanmoe tokenize", "make the shards again with titanmoe tokenize"
"""Advice of messages about shards that are absent, or that cannot be used."""
MAX_PROBLEMS = 8
"""Limit of problems reported per folder."""


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of token shards, of which format, version and shards' names are checked.

    Raises:
        ConfigError: there is none, it is no JSON, or one of these is wrong.
    """
    file = folder / MANIFEST
    try:
        manifest = parse_json(file.read_bytes())
    except FileNotFoundError:
        if (folder / WORK).is_dir():
            raise ConfigError(
                f"{folder} holds unfinished token shards: give the titanmoe tokenize command again"
            ) from None
        raise ConfigError(f"{folder} contains no token shards: there is no {file.absolute()}: {MAKE}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}: check the permissions, or {REMAKE}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{file} is not a manifest of token shards: {REMAKE}")
    if manifest.get("version") != VERSION:
        raise ConfigError(
            f"{file} is of version {manifest.get('version')}, and this titanmoe reads version {VERSION}: use the "
            f"titanmoe that made the shards, or {REMAKE}"
        )
    shards = manifest.get("shards")
    for name in [shard.get("name") for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []:
        if not isinstance(name, str) or not name or name.startswith(".") or not {"/", "\0"}.isdisjoint(name):
            raise ConfigError(f"{file} was changed: {name!r:.80} in it is no file of that folder: {REMAKE}")
    return manifest


def file_sizes(shard: dict[str, Any], dtype: np.dtype) -> dict[str, int]:
    """Return the bytes that each file of a shard must have, by extension, given the shard's entry in the manifest."""
    length = {"tokens": shard["tokens"] * dtype.itemsize, "starts": (shard["documents"] + 1) * 8}
    length |= {"counted": shard["tokens"]} if "counted" in shard["crc32"] else {}
    length |= {"weights": shard["tokens"] * WEIGHTS.itemsize} if "weights" in shard["crc32"] else {}
    return length | ({"sums": 4 * sum(map(count_blocks, length.values()))} if "sums" in shard else {})


def count_blocks(size: int) -> int:
    """Return the number of blocks with a checksum of their own in a file of `size` bytes."""
    return -(-size // BLOCK)


def find_wrong_sizes(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> Iterator[str]:
    """Yield a message for each file of a shard that is missing or has another length than the manifest says.

    `shard` is the shard's entry in the manifest, `dtype` that of its tokens.
    """
    for extension, expected in file_sizes(shard, dtype).items():
        file = folder / f"{shard['name']}.{extension}"
        try:
            actual = file.stat().st_size
        except OSError as error:
            yield f"{file}: {error.strerror}"
            continue
        if actual != expected:
            yield f"{file} has {actual} bytes, but {expected} in its manifest: it was truncated or changed"


class StoredTokenizer(NamedTuple):
    """The tokenizer that made the tokens of shards, with the files of it that lie beside the shards."""

    identity: str
    folder: Path
    digests: dict[str, str]
    """Digest of each file, by name; empty for bytes, and in folders older than this field."""

    def files(self) -> dict[str, Path]:
        """Return the paths of the tokenizer's files, by name; {} if none were stored, as for bytes.

        Raises:
            ConfigError: one is missing or has changed.
        """
        files, problems = {name: self.folder / name for name in self.digests}, []
        for name, file in files.items():
            if name != FILE and not any(fnmatch(name, pattern) for pattern in OTHER_FILES):
                problems.append(f"{self.folder.parent / MANIFEST} was changed: {name!r} is no file of a tokenizer")
            elif file.is_symlink() or not file.is_file():
                problems.append(f"{file} is missing, and the manifest names it")
            elif digest_file(file) != self.digests[name]:
                problems.append(f"{file} has changed since the shards were made")
        if problems:
            raise ConfigError(problems)
        return files

    def open(self, otherwise: str) -> Tokenizer:
        """Open the tokenizer that made the shards: bytes, its stored files, or `otherwise` if none are stored.

        Raises:
            ConfigError: a file is missing or has changed, or the tokenizer cannot be opened or did not make the shards.
        """
        made = f"{self.folder.parent} was made with the tokenizer {self.identity}"
        if FILE in self.digests:
            tokenizer = open_tokenizer(str(self.files()[FILE]))
            problem = f"{made}, and {self.folder} has {tokenizer.identity}: remove from it what was added later"
        else:
            tokenizer = open_tokenizer("bytes" if self.identity == "bytes" else otherwise)
            problem = (
                f"{made}, which is not beside its shards, and data.tokenizer = {otherwise!r} is {tokenizer.identity}: "
                "set it to the one that made them"
            )
        if tokenizer.identity != self.identity:
            raise ConfigError(problem)
        return tokenizer


def digest_file(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


class ShardDocuments(Documents):
    """The documents of a folder of token shards.

    Files are mapped when first read, and no file is kept open. `name`, in logs and metrics, is the folder's by default.

    Raises:
        ConfigError: there are no token shards, they are unfinished, or a file is missing or has another length.
    """

    def __init__(self, folder: Path, name: str = ""):
        self.folder, self.name = folder, name or folder.name
        manifest = read_manifest(folder)
        try:
            self.dtype = DTYPES[manifest["dtype"]]
            self._dtypes = OTHER_DTYPES | {"tokens": self.dtype}
            self.vocab_size: int = manifest["vocab_size"]
            self.tokenizer: dict[str, Any] = manifest["tokenizer"]
            digests = dict(manifest.get("tokenizer_files", {}))
            self.stored_tokenizer = StoredTokenizer(self.tokenizer["identity"], folder / TOKENIZER, digests)
            self.skipped: int = manifest["skipped"]
            self.has_label_mask: bool = manifest["counted"] is not None
            self.completions_per_prompt: int = completions_in_manifest(manifest)
            shards: list[dict[str, Any]] = manifest["shards"]
            self.has_label_weights = any("weights" in shard["crc32"] for shard in shards)
            problems = [problem for shard in shards for problem in find_wrong_sizes(folder, shard, self.dtype)]
            documents, tokens = ([shard[what] for shard in shards] for what in ("documents", "tokens"))
            self._sizes = [file_sizes(shard, self.dtype) for shard in shards]
            problems += [
                f"{folder / shard['name']}.tokens contains token {shard['largest']}, beyond the vocabulary of "
                f"{self.vocab_size} in {folder / MANIFEST}: one of them was changed"
                for shard in shards
                if shard.get("largest", 0) >= self.vocab_size
            ]
            sums = json.dumps([manifest["dtype"], [(shard["tokens"], shard["crc32"]) for shard in shards]])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / MANIFEST} was changed: it cannot be read ({error!r})") from None
        if (sum(documents), sum(tokens)) != (manifest["documents"], manifest["tokens"]):
            problems.append(f"{folder / MANIFEST} was changed: its shards do not add up to its documents and tokens")
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more files of {folder}"]
        if problems:
            raise ConfigError(problems)
        self.fingerprint = "tokens:" + hashlib.blake2b(sums.encode(), digest_size=8).hexdigest()
        self.description = (
            f"{folder}, {sum(documents):,} documents, {sum(tokens):,} tokens of {self.vocab_size:,} kinds"
        )
        self.names = [shard["name"] for shard in shards]
        self._first_document = np.cumsum([0, *documents], dtype=np.int64)
        self.first_token = np.cumsum([0, *tokens], dtype=np.int64)
        self._files: dict[tuple[int, str], CheckedFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __len__(self) -> int:
        return int(self._first_document[-1])

    @property
    def has_sums(self) -> bool:
        """Whether every block has a checksum that is compared when it is first read; False for older folders."""
        return all("sums" in shard_sizes for shard_sizes in self._sizes)

    @property
    def starts(self) -> Starts:
        return Starts(self)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids of tokens [start, stop), counted over all shards.

        Raises:
            ConfigError: a block differs from its checksum, or a token is beyond the vocabulary.
        """
        return self._read("tokens", start, stop)

    def label_mask(self, start: int, stop: int) -> np.ndarray | None:
        return self._read("counted", start, stop) if self.has_label_mask else None

    def label_weights(self, start: int, stop: int) -> np.ndarray | None:
        return self._read("weights", start, stop) if self.has_label_weights else None

    def _read(self, extension: str, start: int, stop: int) -> np.ndarray:
        arrays = []
        for shard, begin, end in split_by_shard(self.first_token, start, stop):
            file = self.open_file(shard, extension)
            array = file.read(slice(begin, end))
            if extension == "tokens" and int(array.max()) >= self.vocab_size:
                at = begin + int(array.argmax())
                raise ConfigError(
                    f"{file.file} has token {array.max()} at position {at:,}, beyond the "
                    f"vocabulary of {self.vocab_size} in {self.folder / MANIFEST}: make the shards again"
                )
            arrays.append(array)
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.empty(0, self._dtypes[extension])

    def open_file(self, shard: int, extension: str) -> CheckedFile:
        """Return one file of a shard, by the shard's index and the file's extension, mapped when first asked for."""
        file = self._files.get((shard, extension))
        if file is None:
            crc32s, sizes = None, self._sizes[shard]
            if "sums" in sizes and extension != "sums":
                at, blocks = [*sizes].index(extension), [count_blocks(size) for size in sizes.values()]
                crc32s = self.open_file(shard, "sums").items[sum(blocks[:at]) : sum(blocks[: at + 1])]
            path = self.folder / f"{self.names[shard]}.{extension}"
            advice = f"copy or make the shards again (titanmoe data verify {self.folder} finds all that has changed)"
            file = self._files[shard, extension] = CheckedFile(path, self._dtypes[extension], crc32s, advice)
        return file


class Starts:
    """The first token of each document, counted over all shards, then the number of all tokens.

    Indexed as an array by an integer, a slice or integers, but read only then.
    """

    def __init__(self, documents: ShardDocuments):
        self._documents = documents
        self._first = documents._first_document

    def __len__(self) -> int:
        return len(self._documents) + 1

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            return self._slice(begin, end) if step == 1 else self[np.arange(begin, end, step)]
        at_N = np.asarray(at, np.int64)
        at_N = np.where(at_N < 0, at_N + len(self), at_N)
        if ((at_N < 0) | (at_N >= len(self))).any():
            raise IndexError(f"there are documents up to {len(self) - 1}, and {at} was asked for")
        if at_N.ndim == 0:
            return int(self._slice(int(at_N), int(at_N) + 1)[0])
        shard_N = np.searchsorted(self._first[1:-1], at_N, side="right")
        start_N = np.empty(at_N.shape, np.int64)
        for shard in np.unique(shard_N):
            in_shard = shard_N == shard
            local = self._read_starts(shard, at_N[in_shard] - self._first[shard])
            start_N[in_shard] = local.astype(np.int64) + self._documents.first_token[shard]
        return start_N

    def _slice(self, begin: int, end: int) -> np.ndarray:
        """Return the first tokens of documents [begin, end), counted over all shards."""
        arrays = [np.empty(0, np.int64)]
        for shard, low, high in split_by_shard(self._first, begin, min(end, len(self) - 1)):
            arrays.append(
                self._read_starts(shard, slice(low, high)).astype(np.int64) + self._documents.first_token[shard]
            )
        if begin < end == len(self):
            arrays.append(self._documents.first_token[-1:])
        return np.concatenate(arrays)

    def _read_starts(self, shard: int, items: slice | np.ndarray) -> np.ndarray:
        """Return the first tokens of some documents of one shard, counted from the shard's first token.

        `items` are indices of the documents in the shard.
        """
        return self._documents.open_file(int(shard), "starts").read(items)


# ---- checking contents


def verify(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Read every file of a folder of token shards, and yield (name, messages) of each shard; [] if nothing is wrong.

    Compares checksums, and tokens with the vocabulary; stored scores and the tokenizer are not looked at.

    Raises:
        ConfigError: the folder cannot be opened as token shards.
    """
    documents = ShardDocuments(folder)
    for number, shard in enumerate(read_manifest(folder)["shards"]):
        problems = []
        crc32s = shard["crc32"] | ({"sums": shard["sums"]} if "sums" in shard else {})
        for extension, expected_crc32 in crc32s.items():
            file = folder / f"{shard['name']}.{extension}"
            crc32 = top = 0
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    crc32 = zlib.crc32(block, crc32)
                    if extension == "tokens":
                        top = max(top, int(np.frombuffer(block, documents.dtype).max()))
            if top >= documents.vocab_size:
                problems.append(f"{file} contains token {top}, beyond the vocabulary of {documents.vocab_size}")
            if crc32 != expected_crc32:
                where = documents.open_file(number, extension).first_changed_range()
                problems.append(
                    f"{file} has changed since it was written{where}: checksum {crc32:08x}, not {expected_crc32:08x}"
                )
        yield shard["name"], problems
