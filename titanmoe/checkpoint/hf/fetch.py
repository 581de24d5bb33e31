"""Find the folder of a model on this machine, from its name. Without torch.

A `name` is a folder, OWNER/MODEL[@REVISION] on the hub, or a URL. What is remote is fetched into a cache once, by one
process of each machine; the others wait for it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from titanmoe.checkpoint.choose_checkpoint import has_begun
from titanmoe.checkpoint.hf.config_json import CONFIG, read_json
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.hub import MAIN, HubRepo, one_at_a_time
from titanmoe.data.remote import file_system, is_url, url_errors
from titanmoe.data.tokenizer import FILE, OTHER_FILES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CARRIED = (CONFIG, "generation_config.json", FILE, *OTHER_FILES)
"""Patterns of the files that a checkpoint carries: config and tokenizer."""
DESCRIBING_FILES = (*CARRIED, INDEX)
"""Patterns of the small files that describe a model without its weights."""
HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
SMALL_MODEL, MAKE_SMALL_MODEL = "models/small", "python scripts/make_small_model.py"
"""The model of the recipes for fine-tuning on any machine, and what makes it. The hub has no owner called models."""
CACHE = "TITANMOE_CACHE"
"""The environment variable with the folder for what is fetched from URLs; the hub's package has a cache of its own."""


def describing_folder(name: str) -> Path:
    """Return a local folder with a model's config.json and tokenizer, fetched if need be; ConfigError if that fails.

    A fetched folder with config.json and tokenizer.json counts as complete: other software may have fetched one alone.
    The path of a name that is a folder is returned unchecked.
    """
    return _folder(name, DESCRIBING_FILES, lambda folder: (folder / CONFIG).is_file() and (folder / FILE).is_file())


def weights_folder(name: str) -> Path:
    """Return a local folder with a model's config.json, tokenizer and weights, fetched if need be.

    The path of a name that is a folder is returned unchecked. ConfigError if fetching fails.
    """
    return _folder(name, (*DESCRIBING_FILES, "*.safetensors"), _has_weights)


def local_folder(name: str) -> Path | None:
    """Return the local folder of a model with its weights, or of a checkpoint; None if there is none. Fetch nothing.

    Of a name that is a path only whether it is a folder is checked.
    """
    if is_url(name):
        folder = _url_cache() / _url_key(name)
        return folder if _has_weights(folder) else None
    if hub := _hub_name(name):
        folder = hub.cached_folder()
        return folder if folder and _has_weights(folder) else None
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else None


def resolve_place(name: str) -> str:
    """Return the resolved path of a model on this machine, or its name if it is not here. Fetch nothing.

    Two names with equal results stand for the same model.
    """
    folder = local_folder(name)
    return str(folder.resolve()) if folder else name


def short_name(name: str) -> str:
    """Return a model's name in lower case without owner, folder and revision: qwen3-8b for Qwen/Qwen3-8B@main."""
    path = Path(name.partition("@")[0]).expanduser()
    path = path.resolve() if path.exists() else path
    hub = next((part for part in reversed(path.parts) if part.startswith("models--")), "")
    return (hub.rpartition("--")[2] or path.name).lower()


def pin_revision(name: str, folder: Path) -> str:
    """Return OWNER/MODEL@COMMIT for a model on the hub, with which exactly this folder can be fetched once more.

    `folder` is where the model is on this machine. Folders and URLs have no revision: their names are returned
    unchanged.
    """
    hub = _hub_name(name)
    return f"{hub.name}@{folder.name}" if hub else name


def fingerprint(name: str, folder: Path) -> str:
    """Return a hash of a model's name and revision, config.json and tensor index, as 16 hexadecimal digits.

    `folder` is where the model is on this machine. Weights are not read.
    """
    digest = blake2b(pin_revision(name, folder).encode(), digest_size=8)
    for file in (CONFIG, INDEX):
        if (folder / file).is_file():
            digest.update((folder / file).read_bytes())
    return digest.hexdigest()


def fetch_first_weights(config: Config, say: Callable[[str], None]) -> None:
    """Fetch the weights of checkpoint.initial_hf if a run that has no checkpoint of its own begins from them.

    Called before the process group is made, so that no collective waits for a download. Every rank may call it: one
    process of each machine fetches. `say` is called with a line for the console before a fetch.

    Raises:
        ConfigError: they cannot be fetched, or it is unknown whether the run has begun.
    """
    checkpoint = config.checkpoint
    if is_remote(checkpoint.initial_hf) and checkpoint.load in ("auto", "none") and not has_begun(config):
        say(f"fetching {checkpoint.initial_hf}")
        weights_folder(checkpoint.initial_hf)


def is_remote(name: str) -> bool:
    """Return whether a model's name is a URL of any scheme, or OWNER/MODEL and not an existing path here.

    The hub is not asked whether it has that model.
    """
    return is_url(name) or _hub_name(name) is not None


def _hub_name(name: str) -> HubRepo | None:
    """Return the repository and revision in a name OWNER/MODEL[@REVISION], existing on the hub or not.

    None for other names, and for what exists here.
    """
    match = HUB_NAME.fullmatch(name)
    return HubRepo(match[1], match[2] or MAIN) if match and not Path(name).exists() else None


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has all files that its index names, or without one config.json and model.safetensors."""
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        return isinstance(names, dict) and all((folder / str(name)).is_file() for name in set(names.values()))
    return (folder / CONFIG).is_file() and (folder / SINGLE).is_file()


def _folder(name: str, patterns: tuple[str, ...], complete: Callable[[Path], bool]) -> Path:
    """Return a model's local folder: a path unchecked, else a folder of a cache, fetched unless it is `complete`."""
    if is_url(name):
        return _from_url(name, patterns, complete)
    if hub := _hub_name(name):
        return _from_hub(hub, patterns, complete)
    return Path(name).expanduser()


# ---- the hub


def _from_hub(repo: HubRepo, patterns: tuple[str, ...], complete: Callable[[Path], bool]) -> Path:
    """Return the folder of a model in the hub's cache, downloading it if it is not complete there.

    Args:
        repo: the model's repository.
        patterns: patterns of the files to download.
        complete: returns whether a folder has all that is needed.

    Raises:
        ConfigError: it cannot be downloaded, or it is the small model, which has to be made on this machine.
    """
    if repo.name == SMALL_MODEL:
        make = f"make it and its data with {MAKE_SMALL_MODEL}, in titanmoe's folder"
        raise ConfigError(f"{repo.name} is no folder here (looked for {Path(repo.name).absolute()}): {make}")

    def download(revision: str) -> str:
        import huggingface_hub

        return huggingface_hub.snapshot_download(repo.name, revision=revision, allow_patterns=list(patterns))

    return repo.fetch(complete, download)


# ---- URLs


def _url_cache() -> Path:
    return Path(os.environ.get(CACHE) or "~/.cache/titanmoe").expanduser() / "models"


def _url_key(url: str) -> str:
    return blake2b(url.rstrip("/").encode(), digest_size=16).hexdigest()


def _from_url(url: str, patterns: tuple[str, ...], complete: Callable[[Path], bool]) -> Path:
    """Return the cache's folder for a URL, copying the model into it unless it is complete: it is never copied anew.

    Of `patterns` only whether "*.safetensors" is among them counts.
    """
    cache, key = _url_cache(), _url_key(url)
    folder = cache / key
    if complete(folder):
        return folder
    with one_at_a_time(cache, key):
        if not complete(folder):
            system, root = file_system(url.rstrip("/"))
            with url_errors(url):
                _copy(system, root, folder, "*.safetensors" in patterns)
    return folder


def _copy(system: Any, root: str, folder: Path, weights: bool) -> None:
    """Copy a model's files from a URL into the cache; each appears under its name once it is complete.

    Files are asked for by name, because an https server has no listing, and not copied if the cache has them.

    Args:
        system: fsspec's file system of the URL.
        root: path of the model in it.
        folder: where to copy to.
        weights: whether to copy the safetensors files too.

    Raises:
        FileNotFoundError: config.json, or a file with weights, is not there.
        ValueError: the index of the tensors names a file outside the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def copy(name: str) -> bool:
        if (folder / name).is_file():
            return True
        if not system.exists(f"{root}/{name}"):
            return False
        unfinished = folder / f"{name}.partial"
        with system.open(f"{root}/{name}", "rb") as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)
        unfinished.rename(folder / name)
        return True

    for name in (name for name in DESCRIBING_FILES if "*" not in name):
        copy(name)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"there is no {CONFIG} in it")
    if weights:
        listed = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else {"": SINGLE}
        names = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
        for name in names:
            if "/" in name or name.startswith("."):
                raise ValueError(f"{INDEX} names {name!r}, which is not in the folder itself")
            if not copy(name):
                raise FileNotFoundError(f"there is no {name} in it")
