"""Tokenization of one unit of the input into shards of its own, in a process of `titanmoe tokenize`.

The process takes units from its parent, one line of JSON each on stdin, and reports its progress on stdout. The
contents of a unit's shards depend on the unit alone. A JSON record next to each finished shard tells how many of the
unit's lines or rows come before its end, so that an interrupted unit can resume there.

Shapes: T tokens of a document, N marks (0 or 1).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from titanmoe.config import ConfigError
from titanmoe.data.chat import ChatEncoder, open_chat_encoder
from titanmoe.data.chat_layouts import TOOLS, ChatError, read_chat
from titanmoe.data.formats import FORMATS
from titanmoe.data.formats.format import FormatSpec
from titanmoe.data.preferences import Document, encode_pair
from titanmoe.data.read_files import read_records
from titanmoe.data.record_reader import BadRecord, Record, RecordReader, Span, json_type_name
from titanmoe.data.token_shards import DTYPES, WORK
from titanmoe.data.tokenizer import Tokenizer, open_tokenizer
from titanmoe.data.write_token_shards import ShardWriter, write_json

BATCH = 1 << 20
"""Number of characters that are tokenized together."""
EXAMPLES = 3
"""Limit of skipped lines that a shard's record quotes."""
REFUSED = 20
"""Limit of malformed records that one error names."""


@dataclass(frozen=True)
class TokenizeJob:
    """The options of a tokenization, as the command or a recipe gives them."""

    paths: list[str]
    """Files, folders, globs, URLs, and data sets on the hub."""
    out: str
    """Folder of the shards; "" in a plan that is not carried out."""
    _: KW_ONLY
    tokenizer: str = "bytes"
    """"bytes", or a tokenizer.json or its folder."""
    format: str = "auto"
    """Name of the data format (titanmoe.data.formats)."""
    field: str = "text"
    chat_template: str = ""
    """A Jinja file; "" for the tokenizer's own."""
    bad_lines: str = "error"
    """"error", or "skip" to leave malformed records out."""
    shard_tokens: int = 1 << 27
    """Largest number of tokens in a shard, unless one record has more."""
    max_document_mb: int = 128
    label_weights: bool = False

    @property
    def format_spec(self) -> FormatSpec:
        return FORMATS.look_up(self.format)

    @property
    def record_field(self) -> str:
        """Field of a record that holds the document: the format's own if `field` is "text", else `field`."""
        return self.format_spec.field if self.field == "text" else self.field

    def reader(self, span: Span) -> RecordReader:
        """Return a reader of the records of a span."""
        format = self.format_spec
        fields = format.alternative_fields, format.optional_fields, format.layouts
        return RecordReader(span, self.record_field, self.max_document_mb, *fields)

    @property
    def has_label_mask(self) -> bool:
        """Whether only some tokens are labels, as in chats and preference pairs."""
        return self.format_spec.conversations or self.format_spec.completions_per_prompt > 1


@dataclass
class UnitProgress:
    """Counts of records for the shard that is being written."""

    items: int
    """Lines or rows of the unit that are done, including those in earlier shards."""
    skipped: int = 0
    empty: int = 0


def dtype_name(tokenizer: Tokenizer) -> str:
    """Return the name of the smallest dtype that holds all token ids: "uint16" or "uint32"."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def open_job_chat(job: TokenizeJob, tokenizer: Tokenizer) -> ChatEncoder | None:
    """Return the encoder of a tokenization's chats or pairs; None if its documents are plain texts.

    For preference pairs, whose completions may be texts, also None if no template is named and the tokenizer has none
    that can be used.

    Raises:
        ConfigError: the chat template of chats, or one that is named, cannot be used.
    """
    try:
        return open_chat_encoder(job.chat_template, tokenizer) if job.has_label_mask else None
    except ConfigError:
        if job.format_spec.conversations or job.chat_template:
            raise
        return None


def record_name(unit: int, shard: int) -> str:
    """Return the file name, without extension, of a unit's shard and of its record: "00012-003" for (12, 3), from 0."""
    return f"{unit:05d}-{shard:03d}"


class UnitTokenizer:
    """Tokenizer of one unit of the input, which writes its shards.

    Args:
        job: the options.
        tokenizer: the tokenizer.
        chat: the encoder of chats and pairs (`open_job_chat`); None for plain texts.
        number: number of the unit.
        shard: number of shards of the unit that are finished.
        items: lines or rows of the unit that the finished shards hold.
    """

    def __init__(
        self, job: TokenizeJob, tokenizer: Tokenizer, chat: ChatEncoder | None, *, number: int, shard: int, items: int
    ):
        self.job, self.tokenizer, self.chat, self.number, self.shard = job, tokenizer, chat, number, shard
        self.progress, self.examples = UnitProgress(items), []
        self.writer: ShardWriter | None = None
        self.bos_N = np.array([] if tokenizer.bos is None else [tokenizer.bos], np.uint32)
        self.eos_N = np.array([tokenizer.eos], np.uint32)

    def run(self, spans: list[Span], progress: Callable[[int, int], None]) -> None:
        """Tokenize the unit and write its shards, continuing after the finished ones.

        `spans` are all of the unit's, also those of finished shards, whose records are read and passed over.
        `progress` is called with the bytes of input and the tokens that were done since its last call.

        Raises:
            ConfigError: a record is malformed, and bad_lines is "error"; or a file or the template cannot be used.
        """
        for batch, size in self._batches(spans):
            tokens, encoded = 0, self._encode_batch(batch)
            for entry, new_documents in encoded:
                if self.job.bad_lines == "error" and _is_bad(entry, new_documents):
                    raise _refusal(
                        [entry, *(entry for entry, new_documents in encoded if _is_bad(entry, new_documents))]
                    )
                tokens += self._add_entry(entry, new_documents)
            progress(size, tokens)
        self._close(last=True)

    def check(self, span: Span, count: int) -> None:
        """Raise a ConfigError if one of the first `count` records of a span is malformed. Writes nothing.

        Chats and pairs are tokenized for that; of texts it only looks whether they can be read.
        """
        _, entries = self._open_span(span)
        first = list(islice(entries, count))
        if self.job.has_label_mask:
            bad = [entry for entry, new_documents in self._encode_batch(first) if _is_bad(entry, new_documents)]
        else:
            bad = [entry for entry in first if isinstance(entry, BadRecord)]
        if bad:
            raise _refusal(bad)

    def _open_span(self, span: Span) -> tuple[RecordReader, Iterator[Record | BadRecord]]:
        """Return a reader of the span, and an iterator over its records; of text, other values are BadRecords."""
        reader = self.job.reader(span)
        entries = read_records(reader)
        return reader, entries if self.job.has_label_mask else texts_only(entries, self.job.record_field)

    def _batches(self, spans: list[Span]) -> Iterator[tuple[list[Record | BadRecord], int]]:
        """Yield (records, bytes of input read since the last batch), without the records of finished shards."""
        done, batch, batch_chars, reported = 0, [], 0, 0
        to_skip = self.progress.items
        for span in spans:
            reader, entries = self._open_span(span)
            for entry in entries:
                if to_skip:
                    to_skip -= 1
                    continue
                batch.append(entry)
                batch_chars += len(entry.value) if isinstance(entry, Record) and isinstance(entry.value, str) else 1024
                if batch_chars >= BATCH:
                    yield batch, done + reader.at - reported
                    batch, batch_chars, reported = [], 0, done + reader.at
            done += span.bytes
        yield batch, done - reported

    def _encode_batch(self, batch: list[Record | BadRecord]) -> Iterator[tuple[Record | BadRecord, list[Document]]]:
        """Yield each record with the documents that it gives, as tokens; no documents if it is malformed or empty.

        A chat that cannot be used becomes a BadRecord. Raises a ConfigError for a chat template that cannot be used.
        """
        masked = self.job.has_label_mask
        texts = [] if masked else [entry.value for entry in batch if _is_text(entry)]
        tokens_of_texts = iter(self.tokenizer.encode_all(texts) if texts else [])
        for entry in batch:
            if isinstance(entry, BadRecord) or (not masked and not _is_text(entry)):
                yield entry, []
            elif not masked:
                yield entry, [(np.concatenate([self.bos_N, next(tokens_of_texts), self.eos_N]), None)]
            else:
                try:
                    yield entry, self._encode_conversation(entry)
                except ChatError as error:
                    yield BadRecord(f"{entry.where()}: {error}"), []
                except ConfigError as error:
                    raise ConfigError([f"{entry.where()}: {problem}" for problem in error.problems]) from None

    def _encode_conversation(self, entry: Record) -> list[Document]:
        """Return the tokenized document of a chat, or the two of a preference pair, with BOS and EOS.

        Raises:
            ChatError: the record cannot be used, or a pair's completions are the same tokens.
        """
        format = self.job.format_spec
        if format.completions_per_prompt == 1:
            messages, tools = entry.value, None
            if format.alternative_fields:
                messages, tools = read_chat(entry.value, "" if self.job.field == "text" else self.job.field)
            elif format.optional_fields:
                messages, tools = messages.get(self.job.record_field), messages.get(TOOLS)
            return [self._add_bos_and_eos(*self.chat.encode(messages, tools))]
        pair = [self._add_bos_and_eos(*one) for one in encode_pair(entry.value, self.tokenizer, self.chat)]
        if np.array_equal(pair[0][0], pair[1][0]):
            raise ChatError("both completions are the same tokens, so neither is better: leave the pair out")
        return pair

    def _add_bos_and_eos(self, tokens_T: np.ndarray, weight_T: np.ndarray) -> Document:
        """Return a document with BOS and EOS where the template did not write them; they have weight 0 as labels.

        Raises:
            ChatError: a weight is neither 0 nor 1, and the job has no label_weights.
        """
        if not self.job.label_weights and (other := np.setdiff1d(weight_T, [0, 1])).size:
            raise ChatError(
                f"a message has the weight {other[0]:g}, and without label_weights a message counts (1) or does not "
                "(0): set label_weights (data.label_weights, --label-weights)"
            )
        if self.tokenizer.bos is not None and (not len(tokens_T) or tokens_T[0] != self.tokenizer.bos):
            tokens_T, weight_T = np.concatenate([self.bos_N, tokens_T]), np.append(np.float32(0), weight_T)
        if not len(tokens_T) or tokens_T[-1] != self.tokenizer.eos:
            tokens_T, weight_T = np.concatenate([tokens_T, self.eos_N]), np.append(weight_T, np.float32(0))
        return tokens_T, weight_T

    def _add_entry(self, entry: Record | BadRecord, new_documents: list[Document]) -> int:
        """Write the documents of a record to the shard, or to a new one if they do not fit; return their tokens' count.

        The documents of a record are never divided, so those of more than shard_tokens get a larger shard. Counts the
        record in `progress`, as empty or skipped if it gave no documents.
        """
        tokens = sum(len(tokens_T) for tokens_T, _ in new_documents)
        if new_documents:
            if self.writer is not None and self.writer.tokens + tokens > self.job.shard_tokens:
                self._close(last=False)
            if self.writer is None:
                name, dtype = record_name(self.number, self.shard), DTYPES[dtype_name(self.tokenizer)]
                masked = self.job.has_label_mask
                self.writer = ShardWriter(Path(self.job.out), name, dtype, masked, masked and self.job.label_weights)
            for tokens_T, weight_T in new_documents:
                self.writer.add(tokens_T, weight_T)
        elif not _is_bad(entry, new_documents):
            self.progress.empty += 1
        else:
            self.progress.skipped += 1
            self.examples = [*self.examples, entry.why][:EXAMPLES]
        self.progress.items += 1
        return tokens

    def _close(self, last: bool) -> None:
        """Complete the current shard, if there is one, and write its record, whose "shard" is null if there is none.

        `last` says whether it is the unit's last record, by which an interrupted unit counts as done.
        """
        record = {"last": last, **vars(self.progress), "examples": self.examples}
        record["counted"] = self.writer.num_labels if self.writer and self.job.has_label_mask else 0
        record["shard"] = self.writer.close() if self.writer else None
        write_json(Path(self.job.out) / WORK / f"{record_name(self.number, self.shard)}.json", record)
        self.writer, self.progress, self.examples = None, UnitProgress(self.progress.items), []
        self.shard += 1


def _is_bad(entry: Record | BadRecord, new_documents: list[Document]) -> bool:
    """Return whether `entry` gave no documents (`new_documents` is empty) although it is not an empty text."""
    return not new_documents and not (isinstance(entry, Record) and entry.value == "")


def _refusal(bad: list[BadRecord]) -> ConfigError:
    """Return the error that names up to REFUSED malformed records; a reason of several in a row is written once."""
    more, problems, before, written = len(bad) - REFUSED, [], "", ""
    for entry in bad[:REFUSED]:
        place, _, why = entry.why.partition(": ")
        if why == written:
            problems.append(f"{place}: as {before}")
        else:
            before, written = place, why
            problems.append(f'{entry.why} (correct it, or skip such records: bad_lines = "skip")')
    return ConfigError(problems + [f"and {more:,} more of the records after them"] * (more > 0))


def _is_text(entry: Record | BadRecord) -> bool:
    return isinstance(entry, Record) and isinstance(entry.value, str) and entry.value != ""


def texts_only(entries: Iterable[Record | BadRecord], field: str) -> Iterator[Record | BadRecord]:
    """Yield the records, with a `BadRecord` in place of each whose value, of the field `field`, is not text."""
    for entry in entries:
        if isinstance(entry, Record) and not isinstance(entry.value, str):
            yield BadRecord(f"{entry.where()}: {field!r} is {json_type_name(entry.value)}, not text")
        else:
            yield entry


def serve() -> None:
    """Tokenize the units that the parent process sends on stdin, until it ends. The main function of a worker process.

    The first line is a `TokenizeJob` as JSON, each other one a unit: {"unit": NUMBER, "shard": FINISHED_SHARDS,
    "items": FINISHED_RECORDS, "spans": [...]}. It writes lines {"at": [BYTES, TOKENS]} meanwhile, {"done": UNIT} after
    each unit, and {"problems": [...]} before it ends with an error.
    """
    # The parent reads stdout: anything else that is printed goes to stderr.
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def respond(**what: Any) -> None:
        print(json.dumps(what), file=responses, flush=True)

    try:
        job = TokenizeJob(**json.loads(sys.stdin.readline()))
        tokenizer = open_tokenizer(job.tokenizer)
        chat = open_job_chat(job, tokenizer)
        for line in sys.stdin:
            request = json.loads(line)
            unit = UnitTokenizer(
                job, tokenizer, chat, number=request["unit"], shard=request["shard"], items=request["items"]
            )
            unit.run([Span(*span) for span in request["spans"]], lambda size, tokens: respond(at=[size, tokens]))
            respond(done=request["unit"])
    except ConfigError as error:
        respond(problems=error.problems)
    except OSError as error:
        respond(problems=[f"{error.filename or job.out}: {error.strerror}"])


if __name__ == "__main__":
    try:
        serve()
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or says what happened
        os._exit(1)
