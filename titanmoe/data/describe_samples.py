"""Samples as the loader trains on them, as text: tokens with ids, what is learned, documents, positions, padding.

`titanmoe data show` prints them, and a fine-tuning run writes its first sample into its folder.

Shapes: T tokens of a sample without padding, B samples, S positions, G segments of a planned sample.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.data.batch import COMPLETION, Batch
from titanmoe.data.documents import find_documents, is_masked
from titanmoe.data.loader import Loader
from titanmoe.data.source_mix import Sample, SourceMix
from titanmoe.data.token_shards import StoredTokenizer
from titanmoe.data.tokenizer import FILE, ByteTokenizer, Tokenizer
from titanmoe.tokens import IGNORE

BRACKETS, GREEN = ("[", "]"), ("\x1b[32m", "\x1b[0m")
"""Text before and after learned tokens: in a file, and on a terminal."""
WIDTH = 100
"""Characters of tokens in a line."""


class Place(NamedTuple):
    """The place of a document of the source in a sample."""

    position: int
    """First position in the sample."""
    number: int
    """Number of the document in the source, from 0."""
    offset: int
    """Tokens of the document before that position, which are not in the sample."""


def explain_marks(marks: tuple[str, str]) -> str:
    """Return a line on how to read samples whose learned tokens stand between these marks."""
    return f"{marks[0]}learned{marks[1]} tokens are labels; each token has its id; -> is only a label, and no input"


def open_stored_tokenizer(stored: StoredTokenizer | None) -> Tokenizer | None:
    """Return the tokenizer of token shards; None if it is unknown or cannot be opened here."""
    if stored is not None and (FILE in stored.digests or stored.identity == ByteTokenizer.identity):
        with suppress(ConfigError, ImportError):
            return stored.open(ByteTokenizer.identity)
    return None


def describe_first_sample(loader: Loader) -> str:
    """Return text on the sample that the loader gives next, for fine-tuning; "" if every token of the data is a label.

    Waits until the sample is read; the loader, that of data rank 0, does not advance.
    """
    corpora = [getattr(source.packer, "documents", None) for source in loader.mix.sources]
    if not any(corpus is not None and is_masked(corpus) for corpus in corpora):
        return ""
    lines = describe_sample(loader.peek()[0], 0, open_stored_tokenizer(loader.mix.tokenizer))
    return "\n".join([explain_marks(BRACKETS), "", *lines, ""])


def describe_sample(
    batch: Batch,
    n: int,
    tokenizer: Tokenizer | None,
    marks: tuple[str, str] = BRACKETS,
    places: list[Place] | None = None,
) -> list[str]:
    """Return lines on a sample: how many positions, labels and padding, and the positions and tokens of each document.

    A token is marked as learned if it is the label of the position before it, not if it has a label itself.

    Args:
        batch: samples that the loader has read.
        n: index of the sample in the batch.
        tokenizer: for the text of tokens; None for ids alone.
        marks: text before and after learned tokens.
        places: the documents of the sample; None if the source's numbers of them are not known.
    """
    token_S, label_S, valid_S = (x[n].numpy() for x in (batch.tokens_BS, batch.labels_BS, batch.valid_BS))
    size, labels = int(valid_S.sum()), int((label_S != IGNORE).sum())
    padding = f", then {len(valid_S) - size:,} of padding" if size < len(valid_S) else ""
    lines = [f"{size:,} positions with {labels:,} labels{padding}"]
    place_of = {place.position: place for place in places or ()}
    if batch.document_BS is None:
        position_T, separate = np.arange(size), {0}
        begins = sorted({0, *place_of})
    else:
        position_T = batch.position_BS[n, :size].numpy()
        begins = [0, *(np.flatnonzero(np.diff(batch.document_BS[n, :size].numpy())) + 1).tolist()]
        separate = {*begins}
    learned_T = np.append(False, label_S[: size - 1] != IGNORE)
    learned_T[sorted(separate)] = False  # what came before such a document does not predict its first token
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], size], strict=True)):
        title = _title(batch, n, begin, end, number, place_of.get(begin))
        lines.append(f"{title}: positions {position_T[begin]:,} to {position_T[end - 1]:,}")
        words = [_describe_token(token, tokenizer) for token in token_S[begin:end].tolist()]
        learned = learned_T[begin:end].tolist()
        if (end == size or end in separate) and label_S[end - 1] != IGNORE:
            words.append(f"-> {_describe_token(int(label_S[end - 1]), tokenizer)}")
            learned.append(True)
        lines += _wrap(words, learned, int(position_T[begin]), marks)
    return lines


def _title(batch: Batch, n: int, begin: int, end: int, number: int, place: Place | None) -> str:
    """Return what positions [begin, end) of sample `n` are, such as "document 2 of the sample" or "pair 1, chosen".

    Args:
        batch: samples that the loader has read.
        n: index of the sample in the batch.
        begin: first position of a document.
        end: one past its last position.
        number: index of the document within the sample.
        place: the document in its source; None if it is not known.
    """
    if COMPLETION not in batch.extra_fields:
        if place is None:
            return f"document {number + 1} of the sample"
        return f"document {place.number + 1:,}" + f", from its token {place.offset + 1:,} on" * (place.offset > 0)
    pair, rejected = divmod(int(batch.extra_fields[COMPLETION][n, begin]), 2)
    # Only a prompt that both completions share is attended to beyond its own end.
    is_shared = batch.until_BS is not None and int(batch.until_BS[n, begin]) > end
    which = "prompt of both" if is_shared else "rejected" if rejected else "chosen"
    return f"pair {pair + 1} of the sample, {which}" if place is None else f"pair {place.number // 2 + 1:,}, {which}"


def _describe_token(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token as TEXT(ID), or its id alone without a tokenizer. The text is in the form of `escape`."""
    if tokenizer is None:
        return str(token)
    return f"{escape(tokenizer.token_text(token))}({token})"


def escape(text: str) -> str:
    """Return a text in one line: spaces are U+2581, and characters that do not print are escaped as in Python."""
    text = text.replace(" ", "\u2581")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _wrap(words: list[str], learned: list[bool], position: int, marks: tuple[str, str]) -> list[str]:
    """Return the words of consecutive positions, from `position` on, as lines that begin with their first position.

    `marks` stand before and after words that are learned and follow each other in a line.
    """
    lines: list[str] = []
    begin = 0
    while begin < len(words):
        end, width = begin, 0
        while end < len(words) and (end == begin or width + len(words[end]) <= WIDTH):
            width += len(words[end]) + 1
            end += 1
        line = [
            marks[0] * (learned[i] and (i == begin or not learned[i - 1]))
            + words[i]
            + marks[1] * (learned[i] and (i == end - 1 or not learned[i + 1]))
            for i in range(begin, end)
        ]
        lines.append(f"  {position + begin:>6}  {' '.join(line)}")
        begin = end
    return lines


def find_places(mix: SourceMix, sample: Sample) -> list[Place]:
    """Return where the source's documents lie in a planned sample, in the order of positions; [] for random tokens."""
    packer, (start_G, pairs_G) = mix.sources[sample.source].packer, sample.segments
    if not hasattr(packer, "documents"):
        return []
    places = []
    for start, pairs, position in zip(start_G.tolist(), pairs_G.tolist(), np.cumsum(pairs_G) - pairs_G, strict=True):
        if not pairs:  # completions that share no prompt
            continue
        first, last = find_documents(packer.documents, np.array([start, start + pairs - 1])).tolist()
        for number in range(first, last + 1):
            begin = int(packer.documents.starts[number])
            places.append(Place(int(position) + max(0, begin - start), number, max(0, start - begin)))
    return places
