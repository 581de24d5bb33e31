"""Streaming decompression of .gz and .zst files, on disk or at a URL, in bounded memory however much they expand.

Called by readers of documents, which see by the compressed stream how much of a file has been read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.data.remote import is_url, open_url

COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 11
"""Bytes of .zst to decompress at one time: at most 64 MiB come out, at 32,768 to 1."""


@contextmanager
def open_decompressed(file: str) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
    """Open a file or URL for reading in this context, and yield (decompressed stream, raw stream).

    A name that ends with .gz or .zst is decompressed; of any other file both streams are the same. The raw stream's
    position tells how much of the compressed input has been read. Errors of reading the streams stay as they are.

    Raises:
        ConfigError: it cannot be opened, or the package that decompresses it is missing.
    """
    try:
        raw = open_url(file) if is_url(file) else open(file, "rb", buffering=1 << 20)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}: check the path and its permissions") from None
    with closing(raw):
        stream: Any = raw
        if file.endswith(".gz"):
            import gzip

            stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
        elif file.endswith(".zst"):
            stream = io.BufferedReader(_Zstd(raw, file), 1 << 20)
        yield stream, raw


class _Zstd(io.RawIOBase):
    """Raw stream of a .zst file's contents, frame after frame. Reading a truncated file raises an EOFError."""

    def __init__(self, raw: io.BufferedIOBase, file: str):
        self.raw, self.new = raw, _zstd_class(file)
        self.frame: Any = None
        self.rest = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self.ready:
            block = self.rest or self.raw.read(CHUNK)
            if not block:
                if self.frame is not None:
                    raise EOFError
                return 0
            self.frame = self.frame or self.new()
            self.ready, self.rest = memoryview(self.frame.decompress(block)), b""
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        size = min(len(into), len(self.ready))
        into[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


def _zstd_class(file: str) -> Any:
    try:
        from compression import zstd  # Python 3.14

        return zstd.ZstdDecompressor
    except ImportError:
        pass
    try:
        import zstandard

        return lambda: zstandard.ZstdDecompressor().decompressobj()
    except ImportError:
        raise ConfigError(f"{file}: reading .zst needs the package zstandard: pip install zstandard") from None
