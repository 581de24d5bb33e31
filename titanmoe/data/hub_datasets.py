"""Data sets on the Hugging Face hub as entries of data.paths: "hf:OWNER/NAME[@REVISION][:[SUBSET/]SPLIT]".

The files of a split are those that the card's YAML (README.md, `configs`) names, or without it those with the usual
names, as the package `datasets` finds them. They are downloaded into the hub's cache (titanmoe.data.hub), next to which
a list of all files of the commit is kept, so that nothing is asked a second time. A run replaces each name by one with
its commit (`pin_datasets`), which its checkpoints record.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.hub import DATASET, MAIN, HubRepo

PREFIX = "hf:"
NAME = re.compile(PREFIX + r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?(?::(?:([^/:]+)/)?([^/:]+))?")
MOST_NAMED = 20
"""Limit of splits or subsets that an error names."""
CARD = "README.md"
READABLE = re.compile(r".*\.(parquet|(jsonl|ndjson|json)(\.gz|\.zst)?)")
"""Names of files in the formats "parquet" and "jsonl"."""
NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""JSON files that describe a data set."""
NUMBERED = re.compile(r"(?:data/)?(\w+(?:\.\w+)*)(?:-\d{5}-of-\d{5}[^/]*|/\d{4}\.parquet)")
"""Names of the files that `datasets` and the hub write, with their split."""
SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Words in names of folders or files by which `datasets` tells splits."""
CONVERTED = "refs/convert/parquet"
"""Revision under which the hub offers most data sets in other formats as Parquet."""

Splits = dict[str, list[str]]
"""Names of files by split."""


class HubDataset(NamedTuple):
    """A split of a data set on the hub, as a user names it."""

    repo: HubRepo
    subset: str
    """A configuration of the card, or a folder if the card has none; "" for the default."""
    split: str
    """"" for train, or the only split."""

    def __str__(self) -> str:
        part = "/".join(filter(None, (self.subset, self.split)))
        return f"{PREFIX}{self.repo.name}@{self.repo.revision}" + f":{part}" * bool(part)

    @property
    def label(self) -> str:
        """A short name for logs and metrics, NAME:SUBSET:SPLIT with what is given: "ultrachat_200k:train_sft"."""
        return ":".join(filter(None, (self.repo.name.partition("/")[2], self.subset, self.split)))

    def at(self, revision: str) -> HubDataset:
        return self._replace(repo=self.repo._replace(revision=revision))


class HubFile(NamedTuple):
    """A downloaded file of a data set."""

    path: Path
    identity: str
    """hf:OWNER/NAME@COMMIT/FILE, which is the same on every machine."""


def is_hub_dataset(entry: str) -> bool:
    return entry.startswith(PREFIX)


def parse_name(entry: str) -> HubDataset:
    """Return the data set that an entry of data.paths names; raise a ConfigError if it is malformed."""
    if not (match := NAME.fullmatch(entry)):
        form = "hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME@REVISION:SUBSET/SPLIT"
        raise ConfigError(f"{entry!r} does not name a data set on the Hugging Face hub: write {form}")
    return HubDataset(HubRepo(match[1], match[2] or MAIN, DATASET), match[3] or "", match[4] or "")


def fetch_files(entry: str) -> list[HubFile]:
    """Return the files of the split that an entry of data.paths names, downloading those that the cache lacks.

    Raises:
        ConfigError: the name is malformed, there is no such data set or split, or it cannot be downloaded.
    """
    dataset = parse_name(entry)
    folder = _fetch_list(dataset.repo)
    names = _choose_split(dataset, folder)

    def has_all(folder: Path) -> bool:
        return all((folder / name).is_file() for name in names)

    def download(revision: str) -> Path:
        _download(dataset.repo, revision, [glob.escape(name) for name in names])
        if lacking := [name for name in names if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{lacking[0]} is not in the cache")
        return folder

    repo = dataset.repo._replace(revision=folder.name)
    repo.fetch(has_all, download)
    return [HubFile(folder / name, f"{PREFIX}{repo.name}@{folder.name}/{name}") for name in names]


def pin_name(entry: str) -> str:
    """Return the hf: name of a data set on the hub with its commit as the revision; any other entry as it is.

    Asks the hub for the list of files if the cache lacks it.

    Raises:
        ConfigError: the name is malformed, or the hub is needed and has no such data set or cannot be reached.
    """
    return str((dataset := parse_name(entry)).at(_fetch_list(dataset.repo).name)) if is_hub_dataset(entry) else entry


def pin_datasets(config: Config, read_record: Callable[[Config], Mapping[str, Any]]) -> Config:
    """Return the config with the commit of each data set on the hub in data.paths and validation.paths.

    A name without a revision gets the commit that the resumed run's checkpoint records for it, else the one in the
    hub's cache, else the hub's newest.

    Args:
        config: the recipe.
        read_record: returns what that checkpoint records besides tensors, of which "config" is read; {} without a
            checkpoint. Called only if a data set is on the hub.

    Raises:
        ConfigError: there is no such data set, or the hub is needed for it and cannot be reached.
    """
    if not any(map(is_hub_dataset, [*config.data.paths, *config.validation.paths])):
        return config
    tables = read_record(config).get("config", {})
    recorded = [entry for table in ("data", "validation") for entry in tables.get(table, {}).get("paths", ())]
    repos = [parse_name(entry).repo for entry in recorded if is_hub_dataset(entry)]
    commits = {repo.name: repo.revision for repo in repos}

    def pin(entry: str) -> str:
        dataset = parse_name(entry) if is_hub_dataset(entry) else None
        if dataset and dataset.repo.revision == MAIN and (commit := commits.get(dataset.repo.name)):
            return str(dataset.at(commit))
        return pin_name(entry)

    data = replace(config.data, paths=[pin(entry) for entry in config.data.paths])
    validation = replace(config.validation, paths=[pin(entry) for entry in config.validation.paths])
    return replace(config, data=data, validation=validation)


# ---- the list of files, and the card


def _download(repo: HubRepo, revision: str, patterns: list[str]) -> Path:
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(repo.name, repo_type=DATASET, revision=revision, allow_patterns=patterns)
    )


def _fetch_list(repo: HubRepo) -> Path:
    """Return the folder of a data set's commit in the cache, whose name is the commit.

    Downloads the card into it and a list of all files beside it, if they are not there; ConfigError if that fails.
    """

    def download(revision: str) -> Path:
        import huggingface_hub

        folder = _download(repo, revision, [CARD])
        names = huggingface_hub.HfApi().list_repo_files(repo.name, repo_type=DATASET, revision=folder.name)
        file = _list_file(folder)
        for parent in (folder, file.parent):
            parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".partial")
        unfinished.write_text(json.dumps(sorted(names)), encoding="utf-8")
        unfinished.rename(file)
        return folder

    return repo.fetch(lambda folder: _listed_files(folder) is not None, download)


def _list_file(folder: Path) -> Path:
    """Return the file that lists a commit's files, beside the folder of commits, where the hub's tools ignore it."""
    return folder.parents[1] / "titanmoe" / f"{folder.name}.json"


def _listed_files(folder: Path) -> list[str] | None:
    """Return the names of all files of a commit; None if they are unknown.

    Without a stored list they are unknown, but in the hub's offline mode those that have been downloaded.
    """
    from huggingface_hub import constants

    if (file := _list_file(folder)).is_file():
        return json.loads(file.read_bytes())
    here = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return here or None if constants.HF_HUB_OFFLINE else None


def _choose_split(dataset: HubDataset, folder: Path) -> list[str]:
    """Return the names, within the repository, of the files of a data set's split; "train" or the only one by default.

    `folder` is the data set's folder in the cache, with the list of its files.

    Raises:
        ConfigError: there is no such split, it has no files that can be read, or the cache lacks some of them.
    """
    title, names = f"{PREFIX}{dataset.repo.name}", _listed_files(folder) or []
    splits = _find_splits(dataset, names, _read_card(folder / CARD))
    where, prefix = (f"{title}:{dataset.subset}", f"{dataset.subset}/") if dataset.subset else (title, "")
    split = dataset.split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if splits and split not in splits:
        missing = f"has no split {split!r}" if dataset.split else "has several splits"
        raise ConfigError(
            f"{where} {missing}: name one, {', '.join(f'{title}:{prefix}{name}' for name in [*splits][:MOST_NAMED])}"
        )
    if not splits.get(split):
        kinds = ", ".join(sorted({PurePosixPath(name).suffix for name in names} - {"", ".md"})) or "none"
        raise ConfigError(
            f"{title}:{prefix}{split} has no Parquet or JSONL files (the data set has {kinds}): the hub may offer "
            f"it as Parquet, {title}@{CONVERTED}:{dataset.subset or 'default'}/{split}"
        )
    counts = Counter(int(n) for name in splits[split] for n in re.findall(r"-\d{5}-of-(\d{5})", name))
    if not _list_file(folder).is_file() and any(count % number for number, count in counts.items()):
        raise ConfigError(f"{title}:{prefix}{split}: the cache lacks some of its files: set HF_HUB_OFFLINE=0 once")
    return splits[split]


def _find_splits(dataset: HubDataset, names: list[str], card: Mapping[str, Any]) -> Splits:
    """Return the files that can be read of each split of a data set's subset.

    `names` are all its files, `card` is the YAML of its card.

    Raises:
        ConfigError: there is no such subset, or there are several and none is named or the default.
    """
    files = [name for name in names if not any(part.startswith((".", "__")) for part in name.split("/"))]
    entries = [entry for entry in card.get("configs") or () if isinstance(entry, dict)]
    configs = {str(entry.get("config_name", "default")): entry for entry in entries}
    folder, patterns = dataset.subset, None
    if configs:
        default = next((name for name, entry in configs.items() if entry.get("default")), "default")
        subset = dataset.subset or (next(iter(configs)) if len(configs) == 1 else default)
        if subset not in configs:
            title = f"{PREFIX}{dataset.repo.name}"
            missing = f"has no subset {subset!r}" if dataset.subset else "has several subsets"
            examples = [f"{title}:{name}/{dataset.split or 'train'}" for name in [*configs][:MOST_NAMED]]
            raise ConfigError(f"{title} {missing}: name one, {', '.join(examples)}")
        folder = str(configs[subset].get("data_dir") or "").removeprefix("./").strip("/")
        patterns = configs[subset].get("data_files")
    inside = [name.removeprefix(f"{folder}/") for name in files if not folder or name.startswith(f"{folder}/")]
    splits = dict(_match_patterns(patterns, inside)) if patterns else _usual_splits(inside)
    return {
        split: [f"{folder}/{name}" if folder else name for name in names if READABLE.fullmatch(name)]
        for split, names in splits.items()
    }


def _read_card(file: Path) -> dict[str, Any]:
    """Return the YAML at the beginning of a card as a dict; {} without card or YAML, ConfigError if not parsable."""
    import huggingface_hub

    try:
        return (huggingface_hub.metadata_load(file) if file.is_file() else None) or {}
    except Exception as error:  # the parser of YAML raises its own
        raise ConfigError(f"{file} has YAML that cannot be read: {' '.join(str(error).split()):.300}") from None


def _match_patterns(data_files: Any, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each split of a card's `data_files` with those of `names` that match; without a split they are train's.

    `data_files` is a glob, or a list of globs and of {"split": NAME, "path": a glob or a list of them}.
    """
    entries = data_files if isinstance(data_files, list) else [data_files]
    if without_split := [entry for entry in entries if not isinstance(entry, dict)]:
        entries = [{"split": "train", "path": without_split}, *(one for one in entries if isinstance(one, dict))]
    for entry in entries:
        paths = entry.get("path", ())
        patterns = map(_glob_to_regex, paths if isinstance(paths, list) else [paths])
        matches = dict.fromkeys(name for pattern in patterns for name in names if pattern.fullmatch(name))
        yield str(entry.get("split", "train")), [*matches]


def _glob_to_regex(pattern: Any) -> re.Pattern[str]:
    """Return the regular expression of a glob, in which ** also matches folders."""
    wild = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", str(pattern).removeprefix("./"))
    return re.compile("".join(wild.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts))


def _usual_splits(names: list[str]) -> Splits:
    """Return the files of each split, told by their names as `datasets` does; all are train's if no name tells.

    The first rule that tells the split of any file decides for all: files of which it tells none are left out. {} if
    no file can be read.
    """
    names = [name for name in names if READABLE.fullmatch(name) and name.rpartition("/")[2] not in NOT_DATA]

    def by_number(name: str) -> str:
        match = NUMBERED.fullmatch(name)
        return match[1] if match else ""

    def by_word(text: str) -> str:
        fits = (split for split, words in SPLIT_WORDS.items() if re.search(f"(?<![A-Za-z])({words})(?![A-Za-z])", text))
        return next(fits, "")

    for split_of in (by_number, lambda name: by_word(name.rpartition("/")[0]), by_word, lambda name: "train"):
        splits: Splits = {}
        for name in names:
            if split := split_of(name):
                splits.setdefault(split, []).append(name)
        if splits:
            return splits
    return {}
