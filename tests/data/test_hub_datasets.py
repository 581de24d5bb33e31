"""Data sets by name, from a hub on loopback: splits, subsets, revisions, the cache, and every refusal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants, file_download

from tests.support import processes
from tests.support.small_hub import SmallHub, serve
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.hub_datasets import fetch_files, pin_datasets, pin_name
from titanmoe.data.open_documents import open_documents
from titanmoe.data.read_files import find_files
from titanmoe.data.tokenize import plan_shards
from titanmoe.data.tokenize_unit import TokenizeJob


def jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def parquet(*texts: str) -> bytes:
    buffer = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": text} for text in texts]), buffer)
    return buffer.getvalue()


def card(yaml: str) -> str:
    return f"---\nlicense: mit\n{yaml}---\n# A data set\n"


FILES = {
    "README.md": card(
        "configs:\n- config_name: default\n  data_files:\n  - split: train_sft\n    path: data/train_sft-*\n"
        "  - split: test_sft\n    path: [data/test_sft-*]\n"
    ),
    "data/train_sft-00000-of-00002.parquet": parquet("one"),
    "data/train_sft-00001-of-00002.parquet": parquet("two", "three"),
    "data/test_sft-00000-of-00001.parquet": parquet("four"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with serve(SmallHub()) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # the second has a copy before 1.0
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield served


def names(entry: str) -> list[str]:
    """Names of the split's files in the data set."""
    return [file.identity.partition("/")[2].split("/", 1)[1] for file in fetch_files(entry)]


def problem(entry: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_files([entry], "auto")
    (text,) = caught.value.problems
    return text


# ---- splits

LAYOUTS: dict[str, tuple[str, list[str], dict[str, list[str]]]] = {
    "by number": (
        "",
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        {
            "": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ":test": ["data/test-00000-of-00001.parquet"],
        },
    ),
    "by folder": (
        "",
        ["train/a.jsonl", "dev/b.jsonl", "train.txt"],
        {"": ["train/a.jsonl"], ":validation": ["dev/b.jsonl"]},
    ),
    "by file": (
        "",
        ["my_train.jsonl.gz", "eval.json", "contrain.json", "dataset_infos.json"],
        {":train": ["my_train.jsonl.gz"], ":test": ["eval.json"]},
    ),
    "one split": ("", ["b.jsonl", "a.jsonl", ".hidden.jsonl", "state.json"], {"": ["a.jsonl", "b.jsonl"]}),
    "the only one": ("", ["test.jsonl"], {"": ["test.jsonl"]}),
    "folders as subsets": (
        "",
        ["de/train-00000-of-00001.parquet", "en/train-00000-of-00001.parquet"],
        {":de/train": ["de/train-00000-of-00001.parquet"]},
    ),
    "the hub's Parquet": (
        "",
        ["default/train_sft/0000.parquet", "default/train_gen/0000.parquet"],
        {":default/train_sft": ["default/train_sft/0000.parquet"]},
    ),
    "files of a subset": (
        "configs:\n- config_name: main\n  data_files: a/*.jsonl\n  default: true\n"
        "- config_name: all\n  data_files: ['**/*.jsonl', a/1.jsonl]\n",
        ["a/1.jsonl", "a/b/2.jsonl", "3.jsonl", "a/x.csv"],
        {"": ["a/1.jsonl"], ":main/train": ["a/1.jsonl"], ":all/train": ["3.jsonl", "a/1.jsonl", "a/b/2.jsonl"]},
    ),
    "a pattern beside a split": (
        "configs:\n- config_name: default\n  data_files:\n  - split: test\n    path: b.jsonl\n  - a*.jsonl\n",
        ["a1.jsonl", "b.jsonl"],
        {"": ["a1.jsonl"], ":test": ["b.jsonl"]},
    ),
    "folders of subsets": (
        "configs:\n- config_name: default\n  data_dir: ./x/\n- config_name: y\n  data_dir: y\n"
        "  data_files:\n  - split: new\n    path: '[0-9]?.jsonl'\n",
        ["x/train.jsonl", "x/test.jsonl", "y/10.jsonl", "y/a0.jsonl"],
        {":test": ["x/test.jsonl"], ":y/new": ["y/10.jsonl"]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_is_found_by_the_card_or_by_the_names_of_files(hub: SmallHub, layout: str) -> None:
    yaml, files, expected = LAYOUTS[layout]
    hub.push("o/n", dict.fromkeys(files, "{}\n") | ({"README.md": card(yaml)} if yaml else {}))
    assert {part: names(f"hf:o/n{part}") for part in expected} == expected


REFUSALS = {
    "hf:o": "'hf:o' does not name a data set on the Hugging Face hub: write hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or ",
    "hf:o/n:train": "hf:o/n has no split 'train': name one, hf:o/n:train_sft, hf:o/n:test_sft",
    "hf:o/n": "hf:o/n has several splits: name one, hf:o/n:train_sft, hf:o/n:test_sft",
    "hf:o/n:other/train": "hf:o/n has no subset 'other': name one, hf:o/n:default/train",
    "hf:o/two": "hf:o/two has several subsets: name one, hf:o/two:a/train, hf:o/two:b/train",
    "hf:o/two:a/test": "hf:o/two:a has no split 'test': name one, hf:o/two:a/train",
    "hf:o/csv": "hf:o/csv:train has no Parquet or JSONL files (the data set has .csv): the hub may offer it as "
    "Parquet, hf:o/csv@refs/convert/parquet:default/train",
    "hf:o/yaml": "README.md has YAML that cannot be read: ",
    "hf:o/gone:train": "does not have the Hugging Face dataset of that name (revision main), or not all of it, and it "
    "cannot be fetched: RepositoryNotFoundError: 401 Client Error",
    "hf:o/n@v9": "(revision v9), or not all of it, and it cannot be fetched: RevisionNotFoundError: 404 Client Error",
}


@pytest.mark.parametrize("entry", REFUSALS)
def test_what_is_not_there_is_refused_with_what_is(hub: SmallHub, entry: str) -> None:
    hub.push("o/n", FILES)
    subsets = "configs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n"
    hub.push("o/two", {"README.md": card(subsets), "a.jsonl": jsonl("a"), "b.jsonl": jsonl("b")})
    hub.push("o/csv", {"train.csv": "text\na\n"})
    hub.push("o/yaml", {"README.md": card("configs: [\n"), "train.jsonl": jsonl("a")})
    assert REFUSALS[entry] in problem(entry)


# ---- the cache


def test_what_the_cache_has_is_not_asked_for(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("o/n", FILES)
    files = fetch_files("hf:o/n:train_sft")
    assert [file.path.read_bytes() for file in files] == [FILES[file.identity.split("/", 2)[2]] for file in files]
    assert files[0].path.parents[3].name == "datasets--o--n" and files[0].path.parents[1].name == commit
    assert not any("test_sft" in request for request in hub.requests), "of other splits nothing is downloaded"
    hub.requests.clear()
    hub.push("o/n", {"README.md": "newer"})
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert fetch_files("hf:o/n:train_sft") == files == fetch_files(f"hf:o/n@{commit}:train_sft")
        assert pin_name("hf:o/n:train_sft") == f"hf:o/n@{commit}:train_sft"
    assert hub.requests == []
    assert "(hf download --repo-type dataset o/n) and name the files" in problem("hf:o/n:test_sft")


def test_offline_the_files_of_other_programs_are_used(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("o/n", FILES)
    (first, second) = fetch_files("hf:o/n:train_sft")
    shutil.rmtree(first.path.parents[3] / "titanmoe")  # the list of files
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_files("hf:o/n:train_sft") == [first, second]
    second.path.unlink()
    assert problem("hf:o/n:train_sft") == (
        "hf:o/n:train_sft: the cache lacks some of its files: set HF_HUB_OFFLINE=0 once"
    )
    assert "LocalEntryNotFoundError: Cannot find an appropriate cached snapshot" in problem("hf:o/never:train")
    assert hub.requests == []


def test_of_processes_that_start_together_one_downloads(hub: SmallHub) -> None:
    hub.push("o/n", FILES)
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(names("hf:o/n:train_sft"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({tuple(each) for each in found}) == 1
    gets = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert len(gets) == len(set(gets)) == 3  # the card and two files


def test_an_unreachable_hub_is_named(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = problem("hf:o/n:train_sft")
    assert text.startswith(
        f"hf:o/n is not here, the cache {constants.HF_HUB_CACHE} does not have the Hugging Face dataset"
    )
    assert "ConnectError" in text and ": check the name, the network and HF_TOKEN, or fetch it elsewhere" in text
    assert "\n" not in text


def test_a_private_data_set_needs_its_token(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("o/n", FILES)
    hub.tokens["o/n"] = "secret"
    assert "RepositoryNotFoundError" in problem("hf:o/n:train_sft")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert len(fetch_files("hf:o/n:train_sft")) == 2


def test_without_the_package_the_message_names_it(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert problem("hf:o/n") == (
        'hf:o/n is not here, and fetching it needs the package huggingface_hub: pip install "titanmoe[hub]"'
    )


# ---- from a name to documents


def test_the_same_commit_is_tokenized_once_wherever_the_cache_lies(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.push("o/n", FILES)
    config = Config()
    config.data.source, config.data.paths = "files", ["hf:o/n:train_sft"]
    documents = open_documents(config, "hf:o/n:train_sft")
    assert (documents.name, len(documents)) == ("n:train_sft", 3)
    assert documents.description.startswith("hf:o/n:train_sft through tokenizer 'bytes', 3 documents")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    job = TokenizeJob(["hf:o/n:train_sft"], "")
    plan = plan_shards(job)
    assert [folder.name for folder in Path("runs/cache").iterdir()] == [plan.identity]
    assert plan.job.paths == [f"hf:o/n@{commit}:train_sft"]
    hub.push("o/n", FILES | {"data/train_sft-00000-of-00002.parquet": parquet("new")})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "third"))
    assert plan_shards(job).identity != plan.identity
    config.data.format = "tokens"
    with pytest.raises(ConfigError, match="token shards are read from a disk"):
        open_documents(config, "hf:o/n:train_sft")


def test_the_command_takes_names_and_writes_down_the_commit(hub: SmallHub, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.push("o/n", {"train.jsonl": jsonl("a", "b")})
    assert main(["tokenize", "hf:o/n", "--out", "shards"]) == 0
    assert json.loads(Path("shards/manifest.json").read_text())["made_from"]["job"]["paths"] == [f"hf:o/n@{commit}"]
    assert main(["tokenize", "hf:o/n", "--format", "parquet", "--out", "others"]) == 2
    assert "'hf:o/n' contains no files of format parquet" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_commit(hub: SmallHub) -> None:
    first = hub.push("o/n", FILES)
    config = Config()
    config.data.paths, config.validation.paths = ["a.jsonl", "hf:o/n:train_sft"], ["hf:o/n:test_sft"]
    pinned = pin_datasets(config, lambda config: {})
    assert pinned.data.paths == ["a.jsonl", f"hf:o/n@{first}:train_sft"]
    assert pinned.validation.paths == [f"hf:o/n@{first}:test_sft"]
    second = hub.push("o/n", FILES | {"more": "x"})
    shutil.rmtree(constants.HF_HUB_CACHE)  # another machine
    record = {"config": {"data": {"paths": pinned.data.paths}, "validation": {"paths": []}}}
    assert pin_datasets(config, lambda config: record) == pinned
    config.data.paths[1] = f"hf:o/n@{second}:train_sft"
    assert pin_datasets(config, lambda config: record).data.paths == config.data.paths


def test_ranks_read_a_name_and_resume_with_its_commit(hub: SmallHub, tmp_path: Path) -> None:
    """Two ranks train; then the data set changes, and another machine, whose cache is empty, goes on."""
    text = [f"the {number}th of many texts" for number in range(40)]
    commit = hub.push("o/n", {"train.jsonl": jsonl(*text)})
    words = ["debug", "--ranks=2", "--parallelism.tp=1", "--parallelism.experts.ep=1", "--training.seq_len=8"]
    words += ["--data.source=files", "--data.paths=hf:o/n", "--checkpoint.enable=true", "--job.name=run"]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}

    def train(home: str, *more: str) -> str:
        environment["HF_HOME"] = str(tmp_path / home)
        done = processes.Started(["-m", "titanmoe", "train", *words, *more], environment, tmp_path, forks=True).wait()
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"hf:o/n@{commit}" in train("first", "--training.steps=2")
    assert len([request for request in hub.requests if request.startswith("GET") and "train.jsonl" in request]) == 1
    newer = hub.push("o/n", {"train.jsonl": jsonl("quite another text" * 20)})
    said = train("second", "--training.steps=3")
    assert f"hf:o/n@{commit}" in said and newer not in said and "after step 2" in said
    assert not any(newer in request for request in hub.requests)
