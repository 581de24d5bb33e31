"""Parallel tokenization of text into token shards, which survives being killed.

The input is split into units by its size alone, and each unit becomes shards of its own (titanmoe.data.tokenize_unit),
whichever process tokenizes it and when (titanmoe.data.tokenize_workers). So the result depends neither on the number of
processes nor on interruptions.
`titanmoe tokenize` and the cache of a run (titanmoe.data.open_documents) call it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.data.chat_layouts import layout_of
from titanmoe.data.hub_datasets import pin_name
from titanmoe.data.read_files import find_files, read_records, split_spans
from titanmoe.data.record_reader import InputFile, Record, Span
from titanmoe.data.remote import is_url
from titanmoe.data.token_shards import (
    DTYPES,
    FORMAT,
    MANIFEST,
    VERSION,
    WORK,
    find_wrong_sizes,
    is_shards,
    read_manifest,
)
from titanmoe.data.tokenize_unit import TokenizeJob, UnitTokenizer, dtype_name, open_job_chat, record_name
from titanmoe.data.tokenize_workers import ProgressMeter, run_workers
from titanmoe.data.tokenizer import CHAT_TEMPLATE, Tokenizer, open_tokenizer
from titanmoe.data.write_token_shards import store_tokenizer, write_json

LOCK, PLAN = ".lock", "plan.json"
IGNORED_OPTIONS = ("out", "bad_lines", "max_document_mb")
"""Fields of a job that change no finished shard."""
MAX_LOOKED_INTO = 16
"""Number of files whose first record is read to see which fields they have."""
FIRST_RECORDS = 8
"""Number of records of a file that are checked before a run starts."""
MIN_UNIT_BYTES, UNITS = 8 << 20, 256
"""Least size of a unit, and the number of units of a medium input, which that many processes can share."""
TOKEN_BYTES = 4
"""Bytes of English text per token with a usual vocabulary, so that a unit of a large input fills about one shard."""


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds token shards whose tokenization was interrupted, or still runs."""
    return (folder / WORK / PLAN).is_file()


@dataclass(frozen=True)
class ShardPlan:
    """The plan of a tokenization: the options, the opened tokenizer, the input files, and a digest of all of it."""

    job: TokenizeJob
    tokenizer: Tokenizer
    sources: list[InputFile]
    identity: str
    """Digest of what the contents of the shards depend on; names their folder in the cache.

    Input files count by path, size and modification time: their contents are not read for it."""
    layout: str = ""
    """Layout of the first chat, a key of `chat_layouts.LAYOUTS`; "" without chats, or if the user names a field."""

    @property
    def tokenizer_files(self) -> dict[str, Path]:
        """Files to store beside the shards, by name: the tokenizer's and the job's chat template; {} if it is bytes."""
        files, template = self.tokenizer.files(), self.job.chat_template
        return files | {CHAT_TEMPLATE: Path(template).expanduser()} if files and template else files


def plan_shards(job: TokenizeJob) -> ShardPlan:
    """Return the plan to tokenize a job's input, after opening tokenizer and chat template and finding the files.

    Of the contents it reads only the first records of chats and pairs. Downloads data sets on the hub into its cache,
    and names their commits in the plan's paths; writes nothing else.

    Raises:
        ConfigError: any of them cannot be used; it has all problems.
    """
    problems: list[str] = []

    def collect_problems(make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except ConfigError as error:
            problems.extend(error.problems)

    tokenizer = collect_problems(open_tokenizer, job.tokenizer)
    sources = collect_problems(find_files, job.paths, job.format)
    chat = collect_problems(open_job_chat, job, tokenizer) if tokenizer else None
    if problems:
        raise ConfigError(problems)
    job = replace(job, paths=[pin_name(path) for path in job.paths])
    settings = {key: value for key, value in asdict(job).items() if key not in ("paths", "tokenizer", *IGNORED_OPTIONS)}
    if not job.label_weights:  # older shards have no such setting, and keep their identity
        del settings["label_weights"]
    optional_fields, firsts = job.format_spec.optional_fields, list(_first_records(job, sources))
    if any(record.get(name) for record in firsts for name in optional_fields):
        # Older shards were made without the records' tools, and keep their identity.
        settings["beside"] = optional_fields
    settings |= {"chat_template": chat.template if chat else "", "version": VERSION, "tokenizer": tokenizer.identity}
    places = [s.identity or (s.file if is_url(s.file) else str(Path(s.file).resolve())) for s in sources]
    inputs = [(place, s.kind, s.bytes, s.mtime_ns) for place, s in zip(places, sources, strict=True)]
    identity = hashlib.blake2b(json.dumps([settings, inputs]).encode(), digest_size=16).hexdigest()
    layout = layout_of(firsts[0]) if firsts and job.format_spec.conversations and job.field == "text" else ""
    return ShardPlan(job, tokenizer, sources, identity, layout)


def _first_records(job: TokenizeJob, sources: list[InputFile]) -> Iterator[dict[str, Any]]:
    """Yield the first record, if sound, of each of the first files, as a dict; none if the format reads one field."""
    format = job.format_spec
    for source in sources[:MAX_LOOKED_INTO] if format.optional_fields or format.alternative_fields else ():
        with suppress(ConfigError):  # reported when it is read
            first = next(split_spans(source, MIN_UNIT_BYTES), None)
            record = first and next(read_records(job.reader(first)), None)
            if isinstance(record, Record):
                yield record.value


def check_first_records(plan: ShardPlan) -> None:
    """Raise a ConfigError if one of the input's first records is malformed; do nothing if such records are skipped.

    Reads 8 records of each of the first 16 files, without those of large files that cannot be divided.
    """
    if plan.job.bad_lines != "error":
        return
    unit = UnitTokenizer(plan.job, plan.tokenizer, open_job_chat(plan.job, plan.tokenizer), number=0, shard=0, items=0)
    for source in plan.sources[:MAX_LOOKED_INTO]:
        first = next(split_spans(source, MIN_UNIT_BYTES), None)
        if first and first.bytes <= MIN_UNIT_BYTES:
            unit.check(first, FIRST_RECORDS)


def split_units(sources: list[InputFile], shard_tokens: int) -> list[list[Span]]:
    """Return the units into which the input is divided, in order: lists of spans, of about the same size together.

    That is a 256th of the input, but at most the bytes of about `shard_tokens` tokens, and at least 8 MiB.
    """
    total = sum(source.bytes for source in sources)
    size = max(min(total // UNITS, TOKEN_BYTES * shard_tokens), MIN_UNIT_BYTES)
    units: list[list[Span]] = []
    unit_bytes = 0
    for source in sources:
        for span in split_spans(source, size):
            if not units or unit_bytes + span.bytes > size:
                units.append([])
                unit_bytes = 0
            units[-1].append(span)
            unit_bytes += span.bytes
    return units


def tokenize(plan: ShardPlan, workers: int, wait: bool = False, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Tokenize what is not yet in the plan's output folder, and return the manifest of the finished token shards.

    Args:
        plan: the plan.
        workers: number of processes.
        wait: whether to wait for another process that works on the folder; otherwise that is a ConfigError.
        log: receives lines of progress.

    Raises:
        ConfigError: a record is malformed or was skipped by an earlier call, which the plan does not allow; the folder
            is of another job; or a file cannot be read or written.
    """
    out = Path(plan.job.out)
    _check_output_outside_inputs(out, plan.job.paths)
    try:
        # Listed once, since another process may be creating files.
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
        if names - {LOCK} and not names & {WORK, MANIFEST}:
            raise ConfigError(f"{out} has other files in it: name a folder that is new or empty")
        out.mkdir(parents=True, exist_ok=True)
        with _lock_folder(out, wait):
            if is_shards(out):
                _check_same_job(plan, out / MANIFEST, read_manifest(out)["made_from"])
                shutil.rmtree(out / WORK, ignore_errors=True)
                manifest = read_manifest(out)
            else:
                manifest = _make_shards(plan, out, workers, log)
    except OSError as error:
        where = error.filename or out
        raise ConfigError(
            f"{where} cannot be read or written: {error.strerror}: check the path, its permissions and the free space"
        ) from None
    if manifest["skipped"] and plan.job.bad_lines == "error":  # by an earlier call with "skip"
        raise ConfigError(
            f'{out} was made with bad_lines = "skip" and lacks {manifest["skipped"]:,} bad lines, such as '
            f'{manifest["examples"][0]}: correct them, or set bad_lines = "skip"'
        )
    return manifest


def _check_output_outside_inputs(out: Path, paths: list[str]) -> None:
    """Raise a ConfigError if the output folder `out` is one of the inputs `paths` or inside it, and so would be read.

    Folders inside a hidden one are never read and pass.
    """
    for path in paths:
        folder, target = Path(path).expanduser().resolve(), out.resolve()
        if target.is_relative_to(folder) and not any(name.startswith(".") for name in target.relative_to(folder).parts):
            raise ConfigError(f"{out} is inside {path}, all of which is read: write the shards elsewhere")


@contextmanager
def _lock_folder(out: Path, wait: bool) -> Iterator[None]:
    """Hold the lock of the output folder within this context, after waiting for it if `wait` is True.

    Raises:
        ConfigError: another process has the lock, and `wait` is False.
    """
    with (out / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(f"another process is writing to {out.absolute()}: wait for it, or stop it") from None
        yield


def _check_same_job(plan: ShardPlan, file: Path, made_from: dict[str, Any]) -> None:
    """Raise a ConfigError that names the differences if an output folder was made by another plan.

    `made_from` has identity and options of that plan, as `file` in the folder records them.
    """
    if made_from["identity"] == plan.identity:
        return
    old_job, new_job = made_from["job"], _describe_job(plan)
    changes = [
        f"{key} was {old_job.get(key)!r} and is {new_job[key]!r}" for key in new_job if old_job.get(key) != new_job[key]
    ]
    what = ", ".join(changes) or "a file of the input has changed"
    raise ConfigError(
        f"{file} says that {file.parent} is being made, or was made, in another way: {what}. Name another --out"
    )


def _describe_job(plan: ShardPlan) -> dict[str, Any]:
    """Return the options of a tokenization that its shards depend on, with the number and bytes of its input files."""
    job = {key: value for key, value in asdict(plan.job).items() if key not in IGNORED_OPTIONS}
    return job | {"files": len(plan.sources), "bytes": sum(source.bytes for source in plan.sources)}


def _make_shards(plan: ShardPlan, out: Path, workers: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Tokenize the units whose shards are missing, write the manifest, and return it. The caller holds `out`'s lock.

    Raises:
        ConfigError: a record is malformed, a process has died, the folder has shards of another job, or there are no
            documents.
    """
    work = out / WORK
    work.mkdir(exist_ok=True)
    made_from = {"identity": plan.identity, "job": _describe_job(plan)}
    if (work / PLAN).exists() and any(out.glob("*.tokens")):
        _check_same_job(plan, work / PLAN, json.loads((work / PLAN).read_bytes()))
    else:  # new, or begun by a command that wrote no shard, such as one with a wrong --field
        for file in work.iterdir():
            file.unlink(missing_ok=True)
        write_json(work / PLAN, made_from)
    for file in work.iterdir():
        if file.suffix[1:].isdecimal():  # left by a process that was killed
            file.unlink(missing_ok=True)

    units = split_units(plan.sources, plan.job.shard_tokens)
    records = [_finished_records(plan, out, number) for number in range(len(units))]
    todo = _unfinished(records)
    if any(records):
        log(f"resuming: {len(units) - len(todo)} of {len(units)} units are made")
    if todo:
        sizes = [sum(span.bytes for span in unit) for unit in units]
        with ProgressMeter(sum(sizes), sum(sizes) - sum(sizes[n] for n in todo), log) as meter:
            run_workers(plan.job, [(n, units[n], records[n]) for n in todo], workers, meter)
        records = [_finished_records(plan, out, number) for number in range(len(units))]
        if remaining := _unfinished(records):
            raise ConfigError(
                f"{out}: {len(remaining)} of {len(units)} units are unfinished, though no process reported a problem: "
                "the same command resumes from the last finished shard"
            )

    manifest = _manifest(plan, made_from, [record for unit_records in records for record in unit_records])
    manifest["tokenizer_files"] = store_tokenizer(out, plan.tokenizer_files)
    if not manifest["documents"]:
        left_out = f" ({manifest['skipped']} bad lines and {manifest['empty']} empty documents were left out)"
        shutil.rmtree(work)
        raise ConfigError(
            f"{', '.join(plan.job.paths)}: there are no documents{left_out}: name files with text, or the field "
            "that has it (--field)"
        )
    write_json(out / MANIFEST, manifest, scratch=work)
    shutil.rmtree(work)
    return manifest


def _finished_records(plan: ShardPlan, out: Path, unit: int) -> list[dict[str, Any]]:
    """Return the records of a unit's finished shards, in order, up to the first with missing or truncated files."""
    records: list[dict[str, Any]] = []
    while (file := out / WORK / f"{record_name(unit, len(records))}.json").exists():
        record = json.loads(file.read_bytes())
        if record["shard"] and any(find_wrong_sizes(out, record["shard"], DTYPES[dtype_name(plan.tokenizer)])):
            break
        records.append(record)
        if record["last"]:
            break
    return records


def _unfinished(records: list[list[dict[str, Any]]]) -> list[int]:
    """Return the numbers of the units whose finished shards, given by their records, do not include the last one."""
    return [number for number, of_unit in enumerate(records) if not (of_unit and of_unit[-1]["last"])]


def _manifest(plan: ShardPlan, made_from: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    shards = [record["shard"] for record in records if record["shard"]]
    tokenizer = plan.tokenizer
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype_name(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": {"identity": tokenizer.identity, "bos": tokenizer.bos, "eos": tokenizer.eos},
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "counted": sum(record["counted"] for record in records) if plan.job.has_label_mask else None,
        "completions_per_prompt": plan.job.format_spec.completions_per_prompt,
        **({"layout": plan.layout} if plan.layout else {}),
        "skipped": sum(record["skipped"] for record in records),
        "empty": sum(record["empty"] for record in records),
        "examples": [line for record in records for line in record["examples"]][:10],
        "made_from": made_from,
        "shards": shards,
    }
