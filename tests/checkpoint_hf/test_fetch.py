"""From a name to a folder: a path, what the hub's cache has, what is fetched once, a URL; and every refusal."""

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch.distributed as dist
from huggingface_hub import constants

from tests import world
from tests.checkpoint_hf import models
from titanmoe.checkpoint.hf import fetch
from titanmoe.cli import main as titanmoe
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.load import load

COMMIT, NEWER = "1" * 40, "2" * 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = models.save(models.make("qwen3_moe"), tmp_path_factory.mktemp("saved") / "model", max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, and a hub that holds `cache.hub`, a folder, as the revision COMMIT."""

    class Cache:
        folder = tmp_path / "hub"
        hub: Path | None = None
        calls: list = []

        def put(self, source, commit=COMMIT, names=None, reference="main"):
            """As the package lays it out: links to blobs."""
            repo = self.folder / "models--owner--model"
            (repo / "refs").mkdir(parents=True, exist_ok=True)
            (repo / "refs" / reference).write_text(commit)
            snapshot = repo / "snapshots" / commit
            snapshot.mkdir(parents=True, exist_ok=True)
            (repo / "blobs").mkdir(exist_ok=True)
            for file in source.iterdir():
                if (names is None or file.name in names) and not (snapshot / file.name).exists():
                    blob = repo / "blobs" / f"{commit[0]}{file.name}"
                    shutil.copyfile(file, blob)
                    (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
            return snapshot

        def download(self, repo, revision, allow_patterns):
            self.calls.append((repo, revision, allow_patterns))
            if self.hub is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("Got: ConnectError: no route\nAnd more.")
            time.sleep(0.05)
            names = [file.name for file in self.hub.iterdir() if any(map(file.match, allow_patterns))]
            return str(self.put(self.hub, COMMIT, names))

    made = Cache()
    made.calls = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.folder))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.chdir(tmp_path)
    return made


def problem(name, make=fetch.weights_folder):
    with pytest.raises(ConfigError) as caught:
        make(name)
    (text,) = caught.value.problems
    return text


# ---- the hub


def test_a_path_is_itself(tmp_path, monkeypatch, cache):
    (tmp_path / "owner/model").mkdir(parents=True)
    for name in ("owner/model", "./elsewhere", "/no/such/folder", "model", "a/b/c"):
        assert fetch.weights_folder(name) == Path(name) and not fetch.is_remote(name)
        assert fetch.pin_revision(name, Path(name)) == name
    assert cache.calls == []


def test_what_the_cache_has_is_not_asked_for(cache, saved):
    snapshot = cache.put(saved)
    assert fetch.describing_folder("owner/model") == fetch.weights_folder("owner/model") == snapshot
    assert fetch.weights_folder(f"owner/model@{COMMIT}") == snapshot
    assert fetch.pin_revision("owner/model", snapshot) == f"owner/model@{COMMIT}"
    assert fetch.pin_revision("owner/model@main", snapshot) == f"owner/model@{COMMIT}"
    assert cache.calls == []


def test_a_tokenizer_that_other_software_did_not_fetch_is_fetched(cache, saved):
    cache.hub, snapshot = saved, cache.put(saved, names=("config.json", "model.safetensors"))
    config = load(["--model.hf", "owner/model"], COMPONENTS, lambda config: [])
    assert config.data.tokenizer == str(snapshot) and len(cache.calls) == 1


def test_a_recipe_gets_the_small_files_and_a_run_the_weights_of_the_same_revision(cache, saved):
    cache.hub = saved
    folder = fetch.describing_folder("owner/model")
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))
    cache.put(saved, NEWER, names=())  # main has moved on: a name that is pinned stays
    assert fetch.weights_folder(fetch.pin_revision("owner/model", folder)) == folder
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in saved.iterdir())
    assert [(call[0], call[1]) for call in cache.calls] == [("owner/model", "main"), ("owner/model", COMMIT)]


def test_part_of_the_weights_is_not_all_of_them(cache, saved):
    one = sorted(file.name for file in saved.glob("*.safetensors"))[0]
    cache.put(saved, names=("config.json", "tokenizer.json", "model.safetensors.index.json", one))
    assert fetch.describing_folder("owner/model")
    assert "LocalEntryNotFoundError: Got: ConnectError: no route: check the name" in problem("owner/model")
    cache.hub = saved
    assert fetch._has_weights(fetch.weights_folder("owner/model"))
    assert {call[1] for call in cache.calls} == {COMMIT}  # of the revision that is there in part


def test_of_processes_that_start_together_one_downloads(cache, saved):
    cache.hub = saved
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch.weights_folder("owner/model"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.calls) == 1 and len(set(results)) == 1 and len(results) == 4


def test_without_a_network_the_message_says_what_to_do(cache):
    text = problem("owner/model", fetch.describing_folder)
    assert text.startswith("owner/model is no folder here, the cache ")
    assert "no route: check the name, the network and HF_TOKEN, or fetch it elsewhere (hf download owner/model)" in text
    assert "And more" not in text


@pytest.mark.parametrize("recipe", ["sft_debug", "dpo_debug"])
def test_recipes_for_fine_tuning_say_how_their_model_is_made(tmp_path, monkeypatch, cache, capsys, recipe):
    monkeypatch.chdir(tmp_path)
    assert titanmoe(["train", recipe]) == 2
    folder = tmp_path / "models/small"
    expected = f"models/small is no folder here (looked for {folder}): make it and its data with "
    assert expected + "python scripts/make_small_model.py, in titanmoe's folder\n" in capsys.readouterr().err
    assert cache.calls == [], "nobody else's model of that name is fetched"


def test_without_the_package_the_message_names_it(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert problem("owner/model") == (
        'owner/model is no folder here, and fetching it needs the package huggingface_hub: pip install "titanmoe[hub]"'
    )


def test_a_cache_that_cannot_be_written_is_named(cache, saved):
    cache.hub = saved
    cache.folder.write_text("a file")
    assert problem("owner/model") == f"cannot write to the cache {cache.folder}: File exists"


def test_a_recipe_by_the_name_on_the_hub(cache, saved):
    snapshot = cache.put(saved)
    config = load(["--model.hf", "owner/model"], COMPONENTS, lambda config: [])
    assert config.model.family == "qwen3_moe" and config.model.num_experts == 8
    assert config.checkpoint.initial_hf == f"owner/model@{COMMIT}"
    assert config.data.tokenizer == str(snapshot)


def test_weights_are_fetched_before_ranks_meet_unless_the_run_has_a_checkpoint(cache, saved, tmp_path):
    cache.hub, said = saved, []
    words = ["--checkpoint.initial_hf", "owner/model", "--job.dump_folder", str(tmp_path), "--job.name", "run"]
    other = load([*words, "--checkpoint.load", str(tmp_path)], COMPONENTS, lambda config: [])
    begun = load(words, COMPONENTS, lambda config: [])
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000001/manifest.json").write_text("{}")
    for config in (other, begun):
        fetch.fetch_first_weights(config, said.append)
    assert cache.calls == said == []
    fetch.fetch_first_weights(load([*words, "--checkpoint.load", "none"], COMPONENTS, lambda config: []), said.append)
    assert len(cache.calls) == 1 and said == ["fetching owner/model"]


# ---- URLs


@pytest.fixture
def url(saved, tmp_path, monkeypatch):
    """The model in a store that fsspec reaches by name."""
    monkeypatch.setenv(fetch.CACHE, str(tmp_path / "cache"))
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for file in saved.iterdir():
        system.pipe(f"/bucket/model/{file.name}", file.read_bytes())
    yield "memory://bucket/model"
    system.rm("/bucket", recursive=True)


def test_a_url_is_copied_once(url, saved, monkeypatch):
    folder = fetch.describing_folder(url)
    assert not list(folder.glob("*.safetensors")) and (folder / "tokenizer.json").is_file()
    assert fetch.weights_folder(f"{url}/") == folder
    assert models.tensors(folder).keys() == models.tensors(saved).keys()
    assert (folder / "config.json").read_bytes() == (saved / "config.json").read_bytes()
    monkeypatch.setattr(fetch, "_copy", None)
    assert fetch.weights_folder(url) == folder
    config = load(["--model.hf", url], COMPONENTS, lambda config: [])
    assert config.checkpoint.initial_hf == url and config.data.tokenizer == str(folder)


def test_a_url_without_a_model_is_refused(url):
    assert problem(f"{url}/none", fetch.describing_folder) == (
        f"{url}/none cannot be read: FileNotFoundError: there is no config.json in it: check the address and the "
        "credentials"
    )
    assert "Protocol not known: nowhere" in problem("nowhere://bucket/model")


def test_a_url_whose_index_points_outside_or_at_nothing_is_refused(url):
    import fsspec

    system = fsspec.filesystem("memory")
    for name, said in (("../x", "names '../x', which is not in the folder itself"), ("gone", "there is no gone in it")):
        system.pipe("/bucket/model/model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode())
        shutil.rmtree(os.environ[fetch.CACHE], ignore_errors=True)
        assert said in problem(url)


def test_without_fsspec_the_message_names_it(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert 'needs the package fsspec: pip install "titanmoe[remote]"' in problem(url)


# ---- ranks that found different models


def agree(folder: str, differ: bool) -> Path:
    from titanmoe.train.checkpoints import Checkpoints

    before = os.getcwd()
    os.chdir(Path(folder) / (str(dist.get_rank()) if differ else "0"))
    try:
        return Checkpoints._find_hf_folder(SimpleNamespace(group=dist.group.WORLD), "model")
    finally:
        os.chdir(before)


def test_ranks_with_different_models_are_refused(tmp_path, saved):
    for rank in "01":
        shutil.copytree(saved, tmp_path / rank / "model")
    described = json.loads((saved / "config.json").read_text()) | {"rope_theta": 5e5}
    (tmp_path / "1/model/config.json").write_text(json.dumps(described))
    assert world.run(2, agree, str(tmp_path), False) == [Path("model"), Path("model")]
    with pytest.raises(world.RankError, match="model is not the same on all machines: ranks 0 and 1 have different"):
        world.run(2, agree, str(tmp_path), True)
