"""Where samples come from. A sample is a function of (seed, its global number): every mapping sees the same ones.

Shapes: N samples, L tokens of one sample, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.counted import bits, key, uniform
from titanmoe.data.open import open_documents
from titanmoe.data.tokenizer import ByteTokenizer

# Tests hold little prose and much data; site-packages differ between machines.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"}


class Corpus:
    """Documents as one long row of tokens; a sample is a window of it at a counted offset."""

    def __init__(self, tokens: Tensor, seed: int):
        self.tokens = tokens
        self._key = key("sample", seed)

    @cached_property
    def fingerprint(self) -> str:
        return "text:" + hashlib.blake2b(self.tokens.numpy(), digest_size=8).hexdigest()

    def samples(self, number_N: Tensor, length: int) -> Tensor:
        """(N, L), int64."""
        offset_N = (bits(self._key, number_N) & (2**63 - 1)) % (len(self.tokens) - length + 1)
        return self.tokens[offset_N.unsqueeze(1) + torch.arange(length)].to(torch.int64)


class Synthetic:
    """Random tokens, token t about as frequent as 1 / (t + 1), as words are in text (Zipf)."""

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size = vocab_size
        self.fingerprint = f"synthetic:{vocab_size}"
        self._key = key("synthetic", seed)

    def samples(self, number_N: Tensor, length: int) -> Tensor:
        """(N, L), int64: floor((V + 1)^u) - 1 with u uniform has P(t) = ln((t + 2) / (t + 1)) / ln(V + 1)."""
        u_NL = uniform(bits(self._key, number_N).unsqueeze(1), torch.arange(length), torch.float64)
        return ((self.vocab_size + 1.0) ** u_NL).to(torch.int64).clamp(max=self.vocab_size) - 1


def open_source(config: Config) -> Corpus | Synthetic:
    seed = config.training.seed
    if config.data.source == "synthetic":
        return Synthetic(config.model.vocab_size, seed)
    tokenizer = ByteTokenizer()
    if config.data.source == "stdlib" and config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size = {config.model.vocab_size} is below the byte tokenizer's {tokenizer.vocab_size}: "
                f"use {tokenizer.vocab_size} or more (320 suits tp up to 64)"
            ]
        )
    if config.data.source == "stdlib":
        files, origin = _stdlib_files()
        tokens = torch.cat([tokenizer.document(_read(file)) for file in files])
    else:
        origin = f"data.paths = {config.data.paths}"
        every = [open_documents(config, entry) for entry in config.data.paths]
        rows = [documents.read(0, documents.starts[-1]).astype("int32") for documents in every]
        tokens = torch.cat([torch.from_numpy(row) for row in rows])
    if len(tokens) <= config.training.seq_len:
        raise ConfigError(
            [
                f"training.seq_len = {config.training.seq_len} needs {config.training.seq_len + 1} tokens per sample, "
                f"{origin} has {len(tokens)}: lower seq_len or add text to data.paths"
            ]
        )
    return Corpus(tokens, seed)


def _stdlib_files() -> tuple[list[Path], str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root, NOT_STDLIB) if file.suffix == ".py"]
    if not files:
        raise ConfigError(
            [
                f'data.source = "stdlib" finds no .py files under {root}, this Python\'s library: '
                'use data.source = "files" with data.paths'
            ]
        )
    return files, f"the standard library's source under {root}"


def _walk(root: Path, skipped: set[str]) -> list[Path]:
    """Every regular file below root but hidden ones, in an order that does not depend on the file system."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
