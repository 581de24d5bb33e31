"""Scores of the tokens of a folder of shards by a model, stored beside the shards.

A score is the log-probability of a token as a label (for DPO's reference), or the top-k ids in its place with their
log-probabilities (for distillation). titanmoe.train.reference computes them; scores/.MODEL.HOST.PID are unfinished.

scores/MODEL/manifest.json      digest of the model and of the shards, seq_len of the sequences scored; written last
scores/MODEL/NAME.logp          a log-probability per token of shard NAME; 0 where it is no label, NaN where unscored
scores/MODEL/NAME.sums          uint32: the CRC-32 of every 64 KiB of NAME.logp; not in older folders
scores/MODEL-topK/NAME.logp     a record per token: K ids (uint32), K + 1 log-probabilities; -topK-tT: temperature T
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.config.parse_json import parse_json
from titanmoe.data.checked_file import BLOCK, CheckedFile, map_file
from titanmoe.data.documents import split_by_shard
from titanmoe.data.token_shards import MANIFEST, ShardDocuments
from titanmoe.data.write_token_shards import BlockSums, write_json
from titanmoe.files import fsync_folder, stream_crc32, write_error

SCORES, EXTENSION, SUMS, LOCK = "scores", "logp", "sums", ".lock"
FORMAT, VERSION = "titanmoe scores", 1
DTYPES = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8")}


class TopK(NamedTuple):
    """Settings of a teacher's top-k scores: k, the softmax temperature, and the vocabulary of the model."""

    top: int
    temperature: float
    vocab_size: int

    def name(self, model: str) -> str:
        """Return the name of the folder that holds top-k scores by a model, given the model's digest."""
        return f"{model}-top{self.top}" + ("" if self.temperature == 1 else f"-t{self.temperature:g}")

    def record(self, dtype: np.dtype) -> np.dtype:
        """Return the NumPy dtype of a token's record: k ids and k + 1 log-probabilities, the last for all other ids."""
        return np.dtype([("ids", "<u4", (self.top,)), ("log_p", dtype, (self.top + 1,))])


class StoredScores:
    """A model's stored scores of all tokens of a folder of shards.

    Files are mapped when first read, and no file is kept open.

    Args:
        folder: the folder scores/MODEL of the shards.
        documents: the token shards.

    Raises:
        ConfigError: the files are of other shards, incomplete or malformed.
    """

    def __init__(self, folder: Path, documents: ShardDocuments):
        self.folder, self.names, self.first_token = folder, documents.names, documents.first_token
        self.advice = _advice(folder)
        self.manifest = _read_manifest(folder)
        try:
            self.dtype, self.seq_len = DTYPES[self.manifest["dtype"]], int(self.manifest["seq_len"])
            shards, top_k = self.manifest["shards"], self.manifest.get("classes")
            self.crc32s = dict(self.manifest["crc32"])
            self.sums = dict(self.manifest[SUMS]) if SUMS in self.manifest else None
            self.top_k = None if top_k is None else TopK(*top_k)
            if self.top_k:
                self.dtype = self.top_k.record(self.dtype)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / MANIFEST} was changed: it cannot be read ({error!r})") from None
        if shards != documents.fingerprint:
            raise ConfigError(
                f"{folder} has scores of other shards ({shards}, and {documents.folder} is "
                f"{documents.fingerprint}): remove that folder, and the scores are recomputed"
            )
        tokens = np.diff(self.first_token).tolist()
        wrong = [
            file
            for name, count in zip(self.names, tokens, strict=True)
            if not (file := self._file(name)).is_file() or file.stat().st_size != count * self.dtype.itemsize
        ]
        if wrong:
            raise ConfigError(f"{wrong[0]} is missing or was truncated: {self.advice}")
        self._files: dict[int, CheckedFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.{EXTENSION}"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the scores of tokens [start, stop) over all shards; raise a ConfigError if a checksum differs."""
        arrays = [
            self._open_file(shard).read(slice(begin, end))
            for shard, begin, end in split_by_shard(self.first_token, start, stop)
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _open_file(self, shard: int) -> CheckedFile:
        """Return a shard's scores, mapped when first asked for; ConfigError if its checksums cannot be used.

        Of older scores, without block checksums, the first read checks the full file.
        """
        if shard not in self._files:
            name = self.names[shard]
            path = self._file(name)
            # Older scores have one checksum per file: the file is one block.
            crc32s, block = (
                ([self.crc32s.get(name)], path.stat().st_size) if self.sums is None else (self._read_sums(name), BLOCK)
            )
            self._files[shard] = CheckedFile(path, self.dtype, crc32s, self.advice, block)
        return self._files[shard]

    def _read_sums(self, name: str) -> np.ndarray:
        """Return the stored CRC-32 of each block of a shard's file; ConfigError if they are missing or have changed."""
        file = self.folder / f"{name}.{SUMS}"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}: {self.advice}") from None
        if zlib.crc32(data) != self.sums.get(name):
            raise ConfigError(f"{file} has changed since it was written: {self.advice}")
        return np.frombuffer(data, "<u4")

    def find_changed_files(self) -> list[str]:
        """Read all scores and any .sums; return a message for each file that differs from the manifest's CRC-32."""
        problems = []
        for name in self.names:
            with self._file(name).open("rb") as stream:
                if stream_crc32(stream) != self.crc32s.get(name):
                    problems.append(f"{stream.name} has changed since it was written: {self.advice}")
            if self.sums is not None:
                try:
                    self._read_sums(name)
                except ConfigError as error:
                    problems += error.problems
        return problems


def find_scores(documents: ShardDocuments, model: str, seq_len: int) -> StoredScores | None:
    """Return the stored scores by a model; None if there are none, or of sequences shorter than `seq_len` tokens.

    `model` is the digest of the model, or the name of a folder of top-k scores.

    Raises:
        ConfigError: the scores are of other shards, incomplete or malformed.
    """
    folder = documents.folder / SCORES / model
    if not (folder / MANIFEST).is_file():
        return None
    scores = StoredScores(folder, documents)
    return scores if scores.seq_len >= seq_len else None


def open_teacher_log_probs(documents: ShardDocuments, name: str, top_k: TopK, seq_len: int) -> StoredScores:
    """Return a teacher's stored top-k scores by the name of their folder (distillation.scores).

    Raises:
        ConfigError: there are none, or they were made with other settings than `top_k`, of shorter sequences than
            `seq_len` or of other shards, or are incomplete.
    """
    folder = documents.folder / SCORES / name
    if not (folder / MANIFEST).is_file():
        others = ", ".join(file.parent.name for file in sorted(folder.parent.glob(f"[!.]*-top*/{MANIFEST}"))) or "none"
        fix = f"titanmoe score TEACHERS_RECIPE --top {top_k.top} --data {documents.folder}"
        raise ConfigError(
            f"distillation.scores = {name!r}: there are none in {folder.parent} (of other names: {others}): {fix}"
        )
    scores, problems = StoredScores(folder, documents), []
    settings = scores.top_k
    if settings is None or settings.name(str(scores.manifest.get("model"))) != name:
        problems.append(f"{folder} has scores of another model than its name says: give it back its name")
    else:
        problems += [
            f"{folder} was made with {what} = {value}, and the recipe has {field} = {wanted}: set it to that, or "
            "compute others with titanmoe score"
            for what, field, value, wanted in zip(
                ("--top", "--temperature", "a vocabulary"),
                ("distillation.top", "distillation.temperature", "model.vocab_size"),
                settings,
                top_k,
                strict=True,
            )
            if value != wanted
        ]
    if scores.seq_len < seq_len:
        problems.append(
            f"{folder} has scores of sequences of {scores.seq_len} tokens, and training.seq_len = {seq_len}: "
            "compute others with titanmoe score, or lower seq_len"
        )
    if problems:
        raise ConfigError(problems)
    return scores


def _advice(folder: Path) -> str:
    return f"remove {folder}, and the scores are recomputed"


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        manifest = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}: {_advice(folder)}") from None
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{file} is no manifest of scores: {_advice(folder)}")
    return manifest


class ScoreWriter:
    """Writer of a model's scores of a folder of shards. They appear in the folder when `close` has completed them.

    Args:
        documents: the token shards.
        model: digest of the model.
        seq_len: tokens of the sequences that are scored.
        dtype: "float32" or "float64", of log-probabilities.
        top_k: settings of top-k scores; None for the log-probabilities of labels.

    Raises:
        ConfigError: the disk is full, or cannot be written to.
    """

    def __init__(self, documents: ShardDocuments, model: str, seq_len: int, dtype: str, top_k: TopK | None = None):
        self.first_token, self.names = documents.first_token, documents.names
        name = top_k.name(model) if top_k else model
        self.dtype = top_k.record(DTYPES[dtype]) if top_k else DTYPES[dtype]
        self.folder = documents.folder / SCORES / name
        # A name per process: machines that share the folder all write the same scores.
        self.unfinished = self.folder.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}")
        self.manifest = {"format": FORMAT, "version": VERSION, "model": model, "shards": documents.fingerprint}
        self.manifest |= {"seq_len": seq_len, "dtype": dtype} | ({"classes": list(top_k)} if top_k else {})
        self._maps: list[np.ndarray] = []
        self._lock: BinaryIO | None = None
        try:
            self._begin()
        except BaseException:
            self.discard()
            raise
        for data in self._maps:
            (data["log_p"] if top_k else data).fill(np.nan)

    def _begin(self) -> None:
        """Lock a temporary folder and create the files of scores in it, with all their space allocated on the disk.

        Removes what killed writers left. Raises a ConfigError if the disk is full, or cannot be written to.
        """
        self.folder.parent.mkdir(exist_ok=True)
        _remove_leftovers(self.folder.parent)
        # Locked before the folder exists: a folder without a held lock counts as a leftover.
        self._lock = _lock_file(self.unfinished).open("wb")
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.unfinished.mkdir(exist_ok=True)
        for name, tokens in zip(self.names, np.diff(self.first_token).tolist(), strict=True):
            file, size = self._file(name), tokens * self.dtype.itemsize
            try:
                with file.open("wb") as stream:  # on a full disk, writing to a mapped file kills the process
                    os.posix_fallocate(stream.fileno(), 0, size)
            except OSError as error:
                raise ConfigError(write_error(file, error, size)) from None
            self._maps.append(map_file(file, self.dtype, writable=True))

    def _file(self, name: str) -> Path:
        return self.unfinished / f"{name}.{EXTENSION}"

    def write(self, start: int, values: np.ndarray) -> None:
        """Write the scores of consecutive tokens from number `start` on, counted over all shards.

        Tokens that are never written stay NaN. A score is a log-probability, or a record of `TopK.record` if there are
        settings of top-k.
        """
        done = 0
        for shard, begin, end in split_by_shard(self.first_token, start, start + len(values)):
            self._maps[shard][begin:end] = values[done : done + end - begin]
            done += end - begin

    def close(self) -> None:
        """Write checksums and manifest, sync them to disk, and move the folder to its final name, replacing an old one.

        Machines that share the folder all call this: the last one's scores, which are equal, stay.

        Raises:
            ConfigError: it cannot be written, as on a full disk; `discard` removes the rest.
        """
        self._maps.clear()
        manifest = self.unfinished / MANIFEST
        crc32s: dict[str, int] = {}
        sums: dict[str, int] = {}
        try:
            for name in self.names:
                crc32s[name], sums[name] = self._sync_shard(name)
            write_json(manifest, self.manifest | {"crc32": crc32s, SUMS: sums})
            fsync_folder(self.unfinished)
        except OSError as error:
            raise ConfigError(write_error(Path(error.filename or manifest), error, BLOCK)) from None
        shutil.rmtree(self.folder, ignore_errors=True)  # older scores, of shorter sequences
        with contextlib.suppress(OSError):  # another machine was first
            os.rename(self.unfinished, self.folder)
            fsync_folder(self.folder.parent)
        self.discard()

    def _sync_shard(self, name: str) -> tuple[int, int]:
        """Sync a shard's scores to disk and write their block checksums; return the CRC-32 of (scores, checksums)."""
        crc32, block_sums, file = 0, BlockSums(), self.unfinished / f"{name}.{SUMS}"
        with self._file(name).open("rb") as stream:
            while block := stream.read(1 << 22):
                crc32 = zlib.crc32(block, crc32)
                block_sums.add(np.frombuffer(block, np.uint8))
            os.fsync(stream.fileno())
        data = np.array(block_sums.all, "<u4").tobytes()
        with file.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        return crc32, zlib.crc32(data)

    def discard(self) -> None:
        """Remove the temporary folder and its lock, if `close` has not moved it."""
        self._maps.clear()
        shutil.rmtree(self.unfinished, ignore_errors=True)
        if self._lock is not None:
            _lock_file(self.unfinished).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


def _lock_file(unfinished: Path) -> Path:
    return unfinished.with_name(unfinished.name + LOCK)


def _remove_leftovers(scores: Path) -> None:
    """Remove temporary folders that killed writers left in the folder of scores: those whose lock nobody holds."""
    for folder in sorted(scores.glob(".*")):
        if not folder.is_dir():
            continue
        with contextlib.suppress(OSError), _lock_file(folder).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            _lock_file(folder).unlink(missing_ok=True)
