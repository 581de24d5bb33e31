"""Token shards: a folder of flat files and a manifest, memory-mapped by a run.

manifest.json      what is in the folder, with the length and checksum of every file; written last
NAME.tokens        the tokens of whole documents, uint16 or uint32, little-endian
NAME.starts        uint64, documents + 1: document i is tokens starts[i]:starts[i + 1] of the shard
NAME.counted       for chats: a byte per token, 1 where the token counts towards the loss as a label
tokenizer/         the tokenizer's files, which a run copies into its checkpoints; none for bytes
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.data.tokenizer import BESIDE, FILE

MANIFEST, WORK, TOKENIZER = "manifest.json", "work", "tokenizer"
FORMAT, VERSION = "titanmoe token shards", 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SHOWN = 8
"""Problems to report per folder."""


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        found = parse_json(file.read_bytes())
    except FileNotFoundError:
        if (folder / WORK).is_dir():
            raise ConfigError(
                [f"{folder} holds unfinished token shards: give the titanmoe tokenize command again"]
            ) from None
        raise ConfigError([f"{folder} contains no token shards: there is no {file.absolute()}"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file} cannot be read: {error}"]) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError([f"{file} is not a manifest of token shards"])
    if found["version"] != VERSION:
        raise ConfigError(
            [
                f"{file} is of version {found['version']}, and this titanmoe reads version {VERSION}: use the titanmoe "
                "that made it, or make the shards again"
            ]
        )
    return found


def sizes(shard: dict[str, Any], dtype: np.dtype) -> dict[str, int]:
    """Bytes of a shard's files, by extension."""
    length = {"tokens": shard["tokens"] * dtype.itemsize, "starts": (shard["documents"] + 1) * 8}
    return length | ({"counted": shard["tokens"]} if "counted" in shard["crc32"] else {})


def misfits(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> Iterator[str]:
    """Files of a shard that are missing or have another length."""
    for extension, expected in sizes(shard, dtype).items():
        file = folder / f"{shard['name']}.{extension}"
        try:
            found = file.stat().st_size
        except OSError as error:
            yield f"{file}: {error.strerror}"
            continue
        if found != expected:
            yield f"{file} has {found} bytes, but {expected} in its manifest: it was truncated or changed"


class KeptTokenizer(NamedTuple):
    """The tokenizer that tokens came from."""

    identity: str
    folder: Path
    digests: dict[str, str]
    """Of its files, by name; none for bytes, and in folders made before shards kept them."""

    def files(self) -> dict[str, Path]:
        """Its files, by name; ConfigError if one is missing or has changed."""
        found, problems = {name: self.folder / name for name in self.digests}, []
        for name, file in found.items():
            if name != FILE and not any(fnmatch(name, pattern) for pattern in BESIDE):
                problems.append(f"{self.folder.parent / MANIFEST} was changed: {name!r} is no file of a tokenizer")
            elif file.is_symlink() or not file.is_file():
                problems.append(f"{file} is missing, and the manifest names it")
            elif digest_of(file) != self.digests[name]:
                problems.append(f"{file} has changed since the shards were made")
        if problems:
            raise ConfigError(problems)
        return found


def digest_of(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def keep_tokenizer(folder: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """Copies a tokenizer's files into a folder of shards; returns their digests."""
    home = folder / TOKENIZER
    for name, file in files.items():
        home.mkdir(exist_ok=True)
        shutil.copyfile(file, home / name)
    return {name: digest_of(home / name) for name in files}


class ShardDocuments:
    """What training reads (titanmoe.data.documents). Files are mapped when first read, and none is kept open."""

    def __init__(self, folder: Path, name: str = ""):
        self.folder, self.name = folder, name or folder.name
        manifest = read_manifest(folder)
        try:
            self.dtype = DTYPES[manifest["dtype"]]
            self.vocab_size: int = manifest["vocab_size"]
            self.tokenizer: dict[str, Any] = manifest["tokenizer"]
            digests = dict(manifest.get("tokenizer_files", {}))
            self.kept_tokenizer = KeptTokenizer(self.tokenizer["identity"], folder / TOKENIZER, digests)
            self.skipped: int = manifest["skipped"]
            self.has_counted: bool = manifest["counted"] is not None
            shards: list[dict[str, Any]] = manifest["shards"]
            problems = [problem for shard in shards for problem in misfits(folder, shard, self.dtype)]
            documents, tokens = ([shard[what] for shard in shards] for what in ("documents", "tokens"))
            sums = json.dumps([manifest["dtype"], [(shard["tokens"], shard["crc32"]) for shard in shards]])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError([f"{folder / MANIFEST} was changed: it cannot be read ({error!r})"]) from None
        if (sum(documents), sum(tokens)) != (manifest["documents"], manifest["tokens"]):
            problems.append(f"{folder / MANIFEST} was changed: its shards do not add up to its documents and tokens")
        if problems:
            more = [f"and {len(problems) - SHOWN} more files of {folder}"] if len(problems) > SHOWN else []
            raise ConfigError(problems[:SHOWN] + more)
        self.fingerprint = "tokens:" + hashlib.blake2b(sums.encode(), digest_size=8).hexdigest()
        self.described = f"{folder}, {sum(documents):,} documents, {sum(tokens):,} tokens of {self.vocab_size:,} kinds"
        self._names = [shard["name"] for shard in shards]
        self._first_document = np.cumsum([0, *documents], dtype=np.int64)
        self._first_token = np.cumsum([0, *tokens], dtype=np.int64)
        self._maps: dict[tuple[int, str], np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def __len__(self) -> int:
        return int(self._first_document[-1])

    @property
    def starts(self) -> Starts:
        return Starts(self)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._read("tokens", self.dtype, start, stop)

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        return self._read("counted", np.dtype(bool), start, stop) if self.has_counted else None

    def _read(self, extension: str, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        parts = []
        for shard, begin, end in _by_shard(self._first_token, start, stop):
            parts.append(self._map(shard, extension, dtype)[begin:end])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def _map(self, shard: int, extension: str, dtype: np.dtype) -> np.ndarray:
        found = self._maps.get((shard, extension))
        if found is None:
            import torch

            # numpy's and Python's own maps each keep a file open, and a process may only have about a thousand.
            file = self.folder / f"{self._names[shard]}.{extension}"
            mapped = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            found = self._maps[shard, extension] = mapped.numpy().view(dtype)
        return found


class Starts:
    """Where each document begins, over all shards, as if it were one array."""

    def __init__(self, documents: ShardDocuments):
        self._of = documents
        self._first = documents._first_document

    def __len__(self) -> int:
        return len(self._of) + 1

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            return self._row(begin, end) if step == 1 else self[np.arange(begin, end, step)]
        at_N = np.asarray(at, np.int64)
        at_N = np.where(at_N < 0, at_N + len(self), at_N)
        if ((at_N < 0) | (at_N >= len(self))).any():
            raise IndexError(f"there are documents up to {len(self) - 1}, and {at} was asked for")
        if at_N.ndim == 0:
            return int(self._row(int(at_N), int(at_N) + 1)[0])
        shard_N = np.searchsorted(self._first[1:-1], at_N, side="right")
        start_N = np.empty(at_N.shape, np.int64)
        for shard in np.unique(shard_N):
            here = shard_N == shard
            local = self._shard(shard)[at_N[here] - self._first[shard]]
            start_N[here] = local.astype(np.int64) + self._of._first_token[shard]
        return start_N

    def _row(self, begin: int, end: int) -> np.ndarray:
        parts = [np.empty(0, np.int64)]
        for shard, low, high in _by_shard(self._first, begin, min(end, len(self) - 1)):
            parts.append(self._shard(shard)[low:high].astype(np.int64) + self._of._first_token[shard])
        if begin < end == len(self):
            parts.append(self._of._first_token[-1:])
        return np.concatenate(parts)

    def _shard(self, shard: int) -> np.ndarray:
        return self._of._map(int(shard), "starts", np.dtype("<u8"))


def _by_shard(first: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The range as ranges within shards, given the first item of each shard."""
    shard = int(np.searchsorted(first, begin, side="right")) - 1
    while begin < end:
        stop = min(end, int(first[shard + 1]))
        if begin < stop:
            yield shard, begin - int(first[shard]), stop - int(first[shard])
        begin, shard = max(begin, stop), shard + 1


# ---- writing


def write_json(file: Path, value: Any, scratch: Path | None = None) -> None:
    """Completely or not at all; what a kill leaves behind is in `scratch`, or next to it."""
    fresh = (scratch or file.parent) / f"{file.name}.{os.getpid()}"
    with fresh.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, file)


class ShardWriter:
    """One shard. Its files appear in `folder` once they are complete."""

    FLUSH = 1 << 20

    def __init__(self, folder: Path, name: str, dtype: np.dtype, with_counted: bool):
        self.folder, self.name, self.dtype = folder, name, dtype
        self.tokens = self.counted = self._held = 0
        self._parts: dict[str, list[np.ndarray]] = {"tokens": []} | ({"counted": []} if with_counted else {})
        self._ends = [0]
        self._crc32 = dict.fromkeys(self._parts, 0)
        self._files = {extension: self._fresh(extension).open("wb") for extension in self._parts}

    def add(self, tokens: np.ndarray, counted: np.ndarray | None = None) -> None:
        """A document."""
        self._parts["tokens"].append(tokens)
        if counted is not None:
            self._parts["counted"].append(counted)
            self.counted += int(counted.sum())
        self.tokens += len(tokens)
        self._held += len(tokens)
        self._ends.append(self.tokens)
        if self._held >= self.FLUSH:
            self._flush()

    def close(self) -> dict[str, Any]:
        """What the manifest says of it."""
        self._flush()
        starts = np.array(self._ends, "<u8")
        self._files["starts"] = self._fresh("starts").open("wb")
        self._files["starts"].write(starts)
        self._crc32["starts"] = zlib.crc32(starts)
        for extension, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._fresh(extension), self.folder / f"{self.name}.{extension}")
        return {"name": self.name, "documents": len(starts) - 1, "tokens": self.tokens, "crc32": self._crc32}

    def _flush(self) -> None:
        for extension, parts in self._parts.items():
            dtype = self.dtype if extension == "tokens" else np.dtype(np.uint8)
            block = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
            self._files[extension].write(block)
            self._crc32[extension] = zlib.crc32(block, self._crc32[extension])
            parts.clear()
        self._held = 0

    def _fresh(self, extension: str) -> Path:
        # One per process: another whose parent was killed may still be writing the same shard.
        return self.folder / WORK / f"{self.name}.{extension}.{os.getpid()}"


# ---- checking contents


def verify(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Reads every file. For each shard its name and what is wrong with it; opening has checked the rest."""
    documents = ShardDocuments(folder)
    for shard in read_manifest(folder)["shards"]:
        problems = []
        for extension, crc32 in shard["crc32"].items():
            file = folder / f"{shard['name']}.{extension}"
            found = 0
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    found = zlib.crc32(block, found)
                    if (
                        extension == "tokens"
                        and (top := int(np.frombuffer(block, documents.dtype).max())) >= documents.vocab_size
                    ):
                        problems.append(f"{file} contains token {top}, beyond the vocabulary of {documents.vocab_size}")
            if found != crc32:
                problems.append(f"{file} has changed since it was written: checksum {found:08x}, not {crc32:08x}")
        yield shard["name"], problems
