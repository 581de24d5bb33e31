"""What a model says of the tokens of a folder of shards, kept beside them: the log-probability of each as a label, or
the likeliest ids in its place.

scores/MODEL/manifest.json      the digest of the model, that of the shards, the length of the sequences; written last
scores/MODEL/NAME.logp          of each token of shard NAME; 0 where it is no label, NaN where nothing was counted
scores/MODEL-topK/NAME.logp     of each token instead a record: K ids (uint32), their log-probabilities and that of all
                                others together; MODEL-topK-tT with the temperature T
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.data.shards import MANIFEST, ShardDocuments, by_shard
from titanmoe.data.write_shards import write_json

SCORES, EXTENSION = "scores", "logp"
FORMAT, VERSION = "titanmoe scores", 1
DTYPES = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8")}


class Classes(NamedTuple):
    """Which ids a model's distributions are kept of."""

    top: int
    temperature: float
    vocab_size: int

    def name(self, model: str) -> str:
        return f"{model}-top{self.top}" + ("" if self.temperature == 1 else f"-t{self.temperature:g}")

    def record(self, dtype: np.dtype) -> np.dtype:
        return np.dtype([("ids", "<u4", (self.top,)), ("log_p", dtype, (self.top + 1,))])


class StoredScores:
    """Files are mapped when first read, and none is kept open."""

    def __init__(self, folder: Path, documents: ShardDocuments):
        self.folder, self.names, self.first_token = folder, documents.names, documents.first_token
        self.manifest = _read_manifest(folder)
        try:
            self.dtype, self.seq_len = DTYPES[self.manifest["dtype"]], int(self.manifest["seq_len"])
            shards, classes = self.manifest["shards"], self.manifest.get("classes")
            self.classes = None if classes is None else Classes(*classes)
            if self.classes:
                self.dtype = self.classes.record(self.dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError([f"{folder / MANIFEST} was changed: it cannot be read ({error!r})"]) from None
        if shards != documents.fingerprint:
            raise ConfigError(
                [
                    f"{folder} has scores of other shards ({shards}, and {documents.folder} is "
                    f"{documents.fingerprint}): remove that folder, and they are counted again"
                ]
            )
        tokens = np.diff(self.first_token).tolist()
        wrong = [
            file
            for name, count in zip(self.names, tokens, strict=True)
            if not (file := self._file(name)).is_file() or file.stat().st_size != count * self.dtype.itemsize
        ]
        if wrong:
            raise ConfigError(
                [f"{wrong[0]} is missing or was truncated: remove {folder}, and the scores are counted again"]
            )
        self._maps: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.{EXTENSION}"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Of tokens [start, stop) of all shards."""
        parts = [self._map(shard)[begin:end] for shard, begin, end in by_shard(self.first_token, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            size = int(self.first_token[shard + 1] - self.first_token[shard])
            self._maps[shard] = _mapped(self._file(self.names[shard]), size, self.dtype, writable=False)
        return self._maps[shard]

    def changed(self) -> list[str]:
        """Files that are not what was written; reads all of them."""
        crc32 = self.manifest["crc32"]
        return [
            f"{file} has changed since it was written: remove {self.folder}, and the scores are counted again"
            for name in self.names
            if _crc32(file := self._file(name)) != crc32.get(name)
        ]


def scores_of(documents: ShardDocuments, model: str, seq_len: int) -> StoredScores | None:
    """Those by a model with this digest, of sequences at least that long; None if there are none. ConfigError if they
    are of other shards."""
    folder = documents.folder / SCORES / model
    if not (folder / MANIFEST).is_file():
        return None
    scores = StoredScores(folder, documents)
    return scores if scores.seq_len >= seq_len else None


def classes_of(documents: ShardDocuments, name: str, classes: Classes, seq_len: int) -> StoredScores:
    """Those of that name; ConfigError if they are not there, or not these classes of sequences at least that long."""
    folder = documents.folder / SCORES / name
    if not (folder / MANIFEST).is_file():
        there = ", ".join(file.parent.name for file in sorted(folder.parent.glob(f"[!.]*-top*/{MANIFEST}"))) or "none"
        fix = f"titanmoe score TEACHERS_RECIPE --top {classes.top} --data {documents.folder}"
        raise ConfigError(
            [f"distillation.scores = {name!r}: there are none in {folder.parent} (of other names: {there}): {fix}"]
        )
    scores, problems = StoredScores(folder, documents), []
    own = scores.classes
    if own is None or own.name(str(scores.manifest.get("model"))) != name:
        problems.append(f"{folder} has scores of another model than its name says: give it back its name")
    else:
        problems += [
            f"{folder} was made with {what} = {value}, and the recipe has {field} = {wanted}: set it to that, or count "
            "others with titanmoe score"
            for what, field, value, wanted in zip(
                ("--top", "--temperature", "a vocabulary"),
                ("distillation.top", "distillation.temperature", "model.vocab_size"),
                own,
                classes,
                strict=True,
            )
            if value != wanted
        ]
    if scores.seq_len < seq_len:
        problems.append(
            f"{folder} is of sequences of {scores.seq_len} tokens, and training.seq_len = {seq_len}: count others with "
            "titanmoe score, or lower seq_len"
        )
    if problems:
        raise ConfigError(problems)
    return scores


def all_scores(documents: ShardDocuments) -> Iterator[StoredScores]:
    for file in sorted((documents.folder / SCORES).glob(f"[!.]*/{MANIFEST}")):
        yield StoredScores(file.parent, documents)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        manifest = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file} cannot be read: {error}: remove {folder}, and they are counted again"]) from None
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ConfigError([f"{file} is no manifest of scores: remove {folder}, and they are counted again"])
    return manifest


class ScoreWriter:
    """Those of one folder of shards. They appear there once they are complete."""

    def __init__(self, documents: ShardDocuments, model: str, seq_len: int, dtype: str, classes: Classes | None = None):
        self.first_token, self.names = documents.first_token, documents.names
        name = classes.name(model) if classes else model
        self.dtype = classes.record(DTYPES[dtype]) if classes else DTYPES[dtype]
        self.folder = documents.folder / SCORES / name
        # One per process: several machines may share the folder, and each writes the same.
        self.unfinished = self.folder.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}")
        self.unfinished.mkdir(parents=True, exist_ok=True)
        self.manifest = {"format": FORMAT, "version": VERSION, "model": model, "shards": documents.fingerprint}
        self.manifest |= {"seq_len": seq_len, "dtype": dtype} | ({"classes": list(classes)} if classes else {})
        self._maps = []
        for name, tokens in zip(self.names, np.diff(self.first_token).tolist(), strict=True):
            with self._file(name).open("wb") as stream:  # a full disk would kill whoever writes to a map of it
                os.posix_fallocate(stream.fileno(), 0, tokens * self.dtype.itemsize)
            self._maps.append(_mapped(self._file(name), tokens, self.dtype, writable=True))
            numbers = self._maps[-1]["log_p"] if classes else self._maps[-1]
            numbers.fill(np.nan)

    def _file(self, name: str) -> Path:
        return self.unfinished / f"{name}.{EXTENSION}"

    def put(self, start: int, values: np.ndarray) -> None:
        """Of the tokens from `start` on, of all shards."""
        done = 0
        for shard, begin, end in by_shard(self.first_token, start, start + len(values)):
            self._maps[shard][begin:end] = values[done : done + end - begin]
            done += end - begin

    def close(self) -> None:
        self._maps.clear()
        write_json(
            self.unfinished / MANIFEST,
            self.manifest | {"crc32": {name: _crc32(self._file(name)) for name in self.names}},
        )
        shutil.rmtree(self.folder, ignore_errors=True)  # of shorter sequences
        with contextlib.suppress(OSError):  # another machine was first
            os.rename(self.unfinished, self.folder)
        self.remove()

    def remove(self) -> None:
        """What is not complete."""
        self._maps.clear()
        shutil.rmtree(self.unfinished, ignore_errors=True)


def _mapped(file: Path, size: int, dtype: np.dtype, writable: bool) -> np.ndarray:
    import torch

    # numpy's own maps keep a file open each, and a process may only have about a thousand.
    data = torch.from_file(str(file), shared=writable, size=size * dtype.itemsize, dtype=torch.uint8)
    return data.numpy().view(dtype)


def _crc32(file: Path) -> int:
    crc32 = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
    return crc32
