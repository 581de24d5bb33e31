"""The Hugging Face hub: what its cache on this machine has, and fetching of the rest by one process of the machine.

Models (titanmoe.checkpoint.hf.fetch) and data sets (titanmoe.data.hub_datasets) are fetched by the hub's own package,
with its cache, token and offline mode. The hub is not asked for anything newer than the cache has: ranks that start one
after the other agree, and a run goes on with what it began with. Without torch.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from titanmoe.config import ConfigError

MAIN = "main"
"""The hub's name of the revision that is meant where none is named."""
DATASET = "dataset"
"""Kind of a repository that holds a data set."""


class HubRepo(NamedTuple):
    """A repository on the hub, at a revision."""

    name: str
    """OWNER/NAME."""
    revision: str = MAIN
    """A branch, tag or commit."""
    kind: str = "model"
    """"model" or DATASET."""

    def cached_folder(self) -> Path | None:
        """Return the folder of the revision in the hub's cache, complete or not; None if there is none.

        Also None without the package huggingface_hub.
        """
        try:
            cache = _cache()
        except ImportError:
            return None
        reference = cache / self._key / "refs" / self.revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else self.revision
        folder = cache / self._key / "snapshots" / commit
        return folder if folder.is_dir() else None

    def fetch(self, is_complete: Callable[[Path], bool], download: Callable[[str], Path | str]) -> Path:
        """Return the folder of the revision in the hub's cache; if something needed is not there, download it.

        One process of the machine downloads at a time; the others then find what it downloaded.

        Args:
            is_complete: returns whether a folder has all that is needed.
            download: downloads what is needed of the revision that it is given, and returns the folder. That is the
                commit of which the cache has a part; `revision` if it has none.

        Raises:
            ConfigError: it cannot be downloaded.
        """
        title = f"{self.name} is no folder here" if self.kind != DATASET else f"hf:{self.name} is not here"
        try:
            cache = _cache()
        except ImportError:
            needs = 'fetching it needs the package huggingface_hub: pip install "titanmoe[hub]"'
            raise ConfigError(f"{title}, and {needs}") from None
        if (folder := self.cached_folder()) and is_complete(folder):
            return folder
        with one_at_a_time(cache, self._key):
            if (folder := self.cached_folder()) and is_complete(folder):
                return folder
            try:  # the revision that is there in part already, or the newest
                return Path(download(folder.name if folder else self.revision))
            except Exception as error:  # the package raises its own, its HTTP client's, and the system's
                raise ConfigError(f"{title}, {self._describe_failure(cache, error)}") from None

    @property
    def _key(self) -> str:
        """Name of the repository's folder in the cache, such as "models--OWNER--NAME"."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"

    def _describe_failure(self, cache: Path, error: Exception) -> str:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        option, then = (" --repo-type dataset", "files") if self.kind == DATASET else ("", "folder")
        return (
            f"the cache {cache} does not have the Hugging Face {self.kind} of that name (revision {self.revision}), or "
            f"not all of it, and it cannot be fetched: {type(error).__name__}: {first_line}: check the name, the "
            f"network and HF_TOKEN, or fetch it elsewhere (hf download{option} {self.name}) and name the {then}"
        )


def _cache() -> Path:
    """Return the folder of the hub's cache. Raises an ImportError without the hub's package."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@contextmanager
def one_at_a_time(folder: Path, key: str) -> Iterator[None]:
    """Wait for a file lock in a cache folder and hold it in this context, so that one process fetches `key` at a time.

    Raises:
        ConfigError: the cache cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f".titanmoe-{key}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to the cache {folder}: {error.strerror}") from None
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
