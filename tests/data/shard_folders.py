"""Folders of token shards for tests, made by the writer itself."""

import json
from pathlib import Path

import numpy as np

from titanmoe.data.token_shards import DTYPES, FORMAT, MANIFEST, VERSION, WORK
from titanmoe.data.write_token_shards import ShardWriter, write_json


def manifest(shards, **changes):
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "uint16",
        "vocab_size": 1000,
        "tokenizer": {"identity": "test", "bos": None, "eos": 0},
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "counted": None,
        "skipped": 0,
        "empty": 0,
        "examples": [],
        "made_from": {},
        "shards": shards,
    } | changes


def make(folder: Path, shards: list[list[list[int]]], label_masks=None, **changes) -> Path:
    """shards: for each, its documents' tokens."""
    (folder / WORK).mkdir(parents=True)
    entries = []
    for n, documents in enumerate(shards):
        dtype = DTYPES[changes.get("dtype", "uint16")]
        writer = ShardWriter(folder, f"{n:05d}-000", dtype, label_masks is not None)
        for k, document in enumerate(documents):
            mask = None if label_masks is None else np.array(label_masks[n][k], bool)
            writer.add(np.array(document, np.uint32), mask)
        entries.append(writer.close())
    (folder / WORK).rmdir()
    write_json(folder / MANIFEST, manifest(entries, **({} if label_masks is None else {"counted": 1}) | changes))
    return folder


def edit(folder: Path, **changes) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))
