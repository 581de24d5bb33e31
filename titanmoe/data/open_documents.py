"""Opening of one entry of data.paths: token shards as they are, other files tokenized once into shards in the cache.

Called by titanmoe.data.sources on every rank. A folder of the cache is named after what is tokenized and how; the first
rank that locks it tokenizes, the others that share it wait.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.formats import FORMATS
from titanmoe.data.hub_datasets import is_hub_dataset, parse_name
from titanmoe.data.remote import is_url
from titanmoe.data.token_scores import TopK, open_teacher_log_probs
from titanmoe.data.token_shards import MANIFEST, ShardDocuments, is_shards, read_manifest
from titanmoe.data.tokenize import ShardPlan, is_unfinished, plan_shards, tokenize
from titanmoe.data.tokenize_command import describe_layout, summarize
from titanmoe.data.tokenize_unit import TokenizeJob
from titanmoe.this_process import is_rank_0, usable_cores


def open_documents(config: Config, entry: str, field: str = "") -> ShardDocuments:
    """Open an entry of data.paths, after tokenizing it into the cache if it is not token shards.

    Every rank calls this. The first to get the lock of the cache's folder tokenizes; ranks that share the folder wait
    for it.

    Args:
        config: the recipe.
        entry: a file, folder, glob, URL or data set on the hub.
        field: field of the records that holds the document; "" for data.field.

    Raises:
        ConfigError: the entry cannot be read, or does not fit the recipe's vocabulary or tokenizer.
    """
    path = _find_path(config, entry)
    name = parse_name(entry).label if is_hub_dataset(entry) else path.name or entry
    if _is_tokenized(config, path):
        documents = ShardDocuments(path, name)
    else:
        documents = ShardDocuments(_tokenize_into_cache(config, entry, name, field or config.data.field), name)
        documents.description = (
            f"{entry} through tokenizer {config.data.tokenizer!r}, {len(documents):,} documents, "
            f"{int(documents.starts[len(documents)]):,} tokens"
        )
    if config.data.label_weights and not documents.has_label_weights:
        raise ConfigError(
            f"data.label_weights = true, and {entry!r} has no weights of labels: make its shards from chats with "
            "titanmoe tokenize --label-weights, or name the chats themselves"
        )
    _check_vocab_size(config, entry, documents.vocab_size)
    _check_same_tokenizer(config, entry, documents)
    return documents


def plan_to_tokenize(config: Config, entry: str, field: str = "") -> ShardPlan | None:
    """Return the plan by which `open_documents`, with the same arguments, would tokenize an entry of data.paths.

    None if the entry is token shards, or the cache has it already. The plan has no output folder yet (`job.out` is "").
    Writes nothing but the hub's cache.

    Raises:
        ConfigError: the entry's files, the tokenizer or the chat template cannot be used.
    """
    if _is_tokenized(config, _find_path(config, entry)):
        return None
    plan, out = _plan_shards(config, entry, field or config.data.field)
    return None if is_shards(out) else plan


def _find_path(config: Config, entry: str) -> Path:
    """Return the path of an entry of data.paths. URLs, globs and data sets on the hub are not looked for.

    Raises:
        ConfigError: a file or folder does not exist, or token shards are named by a URL or on the hub.
    """
    path = Path(entry).expanduser()
    is_remote = is_url(entry) or is_hub_dataset(entry)
    if is_remote and FORMATS.look_up(config.data.format).tokenized:
        raise ConfigError(f"{entry!r}: token shards are read from a disk: copy their folder to one")
    if not is_remote and not path.exists() and not glob.has_magic(entry):
        raise ConfigError(
            f"{entry!r} does not exist (looked for {path.absolute()}): make it with `titanmoe tokenize`, for which "
            "a recipe has the command in its first lines, or use random tokens with --data.source synthetic"
        )
    return path


def _is_tokenized(config: Config, path: Path) -> bool:
    return FORMATS.look_up(config.data.format).tokenized or is_shards(path) or is_unfinished(path)


def _plan_shards(config: Config, entry: str, field: str) -> tuple[ShardPlan, Path]:
    """Return the plan to tokenize an entry of data.paths, and the folder in the cache for its token shards.

    The folder may not exist yet. Raises a ConfigError if the entry, tokenizer or chat template cannot be used.
    """
    data = config.data
    job = TokenizeJob(
        [entry],
        "",
        tokenizer=data.tokenizer,
        format=data.format,
        field=field,
        chat_template=data.chat_template,
        bad_lines=data.bad_lines,
        max_document_mb=data.max_document_mb,
        label_weights=data.label_weights,
    )
    plan = plan_shards(job)
    _check_vocab_size(config, entry, plan.tokenizer.vocab_size)
    return plan, Path(config.job.dump_folder, data.cache, plan.identity)


def _tokenize_into_cache(config: Config, entry: str, name: str, field: str) -> Path:
    plan, out = _plan_shards(config, entry, field)

    def log(line: str) -> None:
        print(f"data: {name}: {line}", flush=True)

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.cache: cannot write to {out.absolute()}: {error.strerror}: name another folder, or make shards "
            "with `titanmoe tokenize` and name those in data.paths"
        ) from None
    new = not is_shards(out)
    # The ranks of a node start together, and one of them does the work.
    manifest = tokenize(replace(plan, job=replace(plan.job, out=str(out))), usable_cores(), wait=True, log=log)
    if is_rank_0():
        for line in summarize(str(out), manifest) if new else filter(None, [describe_layout(manifest)]):
            log(line)
    return out


def _check_vocab_size(config: Config, entry: str, vocab_size: int) -> None:
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is below {vocab_size}, the vocabulary of {entry!r} and "
            f"its tokenizer: use {vocab_size} or more ({-(-vocab_size // 64) * 64} suits tp up to 64)"
        )


def _check_same_tokenizer(config: Config, entry: str, documents: ShardDocuments) -> None:
    """Raise a ConfigError if an entry, shards or not, has another tokenizer than the first token shards of data.paths.

    If data.paths has no token shards, nothing is compared: data.tokenizer makes the tokens of all its entries.
    """
    shards = [other for other in config.data.paths if is_shards(Path(other).expanduser())]
    if not shards or shards[0] == entry:
        return
    first: dict[str, Any] = read_manifest(Path(shards[0]).expanduser())["tokenizer"]
    if first != documents.tokenizer:
        raise ConfigError(
            f"{entry!r} was made with another tokenizer ({documents.tokenizer['identity']}) than {shards[0]!r} "
            f"({first['identity']}): make both with one, or set data.tokenizer to that of {shards[0]}/{MANIFEST}"
        )


def attach_teacher_log_probs(config: Config, sources: Sequence[ShardDocuments]) -> None:
    """Set `stored_teacher_log_probs` of each source to a teacher's stored scores, if distillation.scores names some.

    Raises:
        ConfigError: a source has no such scores, or of another top-k, temperature or vocabulary or a smaller seq_len.
    """
    options, problems = config.distillation, []
    top_k = TopK(options.top, options.temperature, config.model.vocab_size)
    for documents in sources if options.scores else ():
        try:
            documents.stored_teacher_log_probs = open_teacher_log_probs(
                documents, options.scores, top_k, config.training.seq_len
            )
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
