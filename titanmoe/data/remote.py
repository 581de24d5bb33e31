"""Files at URLs, read through the package fsspec: s3://, gs://, https:// and any scheme that it has a driver for.

Called by readers of data and of Hugging Face models. All errors of drivers become ConfigErrors with the URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from hashlib import blake2b
from io import BufferedIOBase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from titanmoe.config import ConfigError

VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "mtime", "LastModified", "last_modified")
"""Keys under which stores report something that changes with a file's contents; some stores have `created` alone."""


class RemoteFile(NamedTuple):
    """A file at a URL."""

    url: str
    bytes: int
    version: int
    """Hash of what the store says about the file's version: it changes with the contents if the store reports any
    version."""
    matched: bool
    """Whether the URL or its glob names the file itself rather than a folder that contains it."""


def is_url(name: str) -> bool:
    return "://" in name


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path within it. ConfigError if it or the driver is missing."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f'{url}: reading it needs the package fsspec: pip install "titanmoe[remote]"') from None
    with url_errors(url):
        return fsspec.core.url_to_fs(url)


@contextmanager
def url_errors(url: str) -> Iterator[None]:
    """Turn any error inside the context into a ConfigError that names the URL; a ConfigError passes as it is."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise ConfigError(f"{url} cannot be read: {why}: check the address and the credentials") from None


def open_url(url: str) -> BufferedIOBase:
    """Open a file at a URL for reading bytes; ConfigError if that fails."""
    system, path = file_system(url)
    with url_errors(url):
        return system.open(path, "rb")


def find_remote_files(url: str) -> list[RemoteFile]:
    """Return the file at a URL, or all files below a folder or glob, sorted by path, without hidden ones.

    [] if a folder or glob has none. On a web server a name that ends with / is a folder, and only * makes a glob.

    Raises:
        ConfigError: there is no such file, it cannot be read, or the server does not say how large it is.
    """
    system, root = file_system(url)
    # A web server has no folders: fsspec would read the page and look for links. And ? begins a query.
    web = url.startswith(("http://", "https://"))
    with url_errors(url):
        if "*" in root if web else has_magic(root):
            fixed = re.split(r"[*?[]", root)[0].rpartition("/")[0]
            every = system.glob(root, detail=True)
            matches = {path: info for path, info in every.items() if not _hidden(path, fixed)}
            folders = [path for path, info in matches.items() if info["type"] == "directory"]
            files = {path: info for path, info in matches.items() if info["type"] == "file"}
        elif url.endswith("/") if web else system.isdir(root):
            folders, files = [root], {}
        else:
            folders, files = [], {root: system.info(root)}
        below: dict[str, Any] = {}
        for folder in folders:
            inside = system.find(folder, detail=True)
            below |= {path: info for path, info in inside.items() if not _hidden(path, folder)}
        infos = below | files
        return [_remote_file(system, path, infos[path], path in files) for path in sorted(infos)]


def _hidden(path: str, folder: str) -> bool:
    return any(name.startswith(".") for name in PurePosixPath(path.removeprefix(folder)).parts)


def _remote_file(system: Any, path: str, info: dict[str, Any], matched: bool) -> RemoteFile:
    url = system.unstrip_protocol(path)
    if info.get("size") is None:
        info = system.info(path)
    if info.get("size") is None:
        raise ConfigError(f"{url}: the server does not say how large it is: copy it here")
    stated = [(key, str(info[key])) for key in (*VERSION_KEYS, "created") if info.get(key) is not None]
    version = int.from_bytes(blake2b(repr(stated).encode(), digest_size=7).digest(), "big")
    return RemoteFile(url, info["size"], version, matched)
