"""Hugging Face hub on loopback: as much of its HTTP API as downloads of data sets use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class SmallHub:
    """Data sets by name, each with its commits; `requests` lists the method and path of each request."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.tokens: dict[str, str] = {}
        """Token that a data set needs, by name."""
        self.requests: list[str] = []
        self.endpoint = ""

    def push(self, name: str, files: dict[str, bytes | str], branch: str = "main") -> str:
        """Make a commit of these files alone the newest of a branch, and return its hash."""
        contents = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        commit = hashlib.sha1(repr((name, sorted(contents.items()))).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = contents
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def respond(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the response to a request with a token, "" for none.

        The status is 401 for an unknown data set or wrong token, 404 for an unknown commit or branch; KeyError is
        raised for an unknown file. `path` is that of the URL, such as "/api/datasets/OWNER/NAME/revision/main".
        """
        parts = path.strip("/").split("/")
        parts = parts[1:] if parts[0] == "api" else parts
        _, owner, name, action, *rest = parts
        repo = f"{owner}/{name}"
        if repo not in self.commits or self.tokens.get(repo, token) != token:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        rest = [unquote(part) for part in rest]  # a branch with slashes is one part
        commit = self.branches[repo].get(rest[0], rest[0])
        if commit not in self.commits[repo]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = self.commits[repo][commit]
        if action == "revision":
            siblings = [{"rfilename": file} for file in files]
            return _json({"id": repo, "sha": commit, "siblings": siblings, "private": False, "disabled": False})
        if action == "tree":
            entries = [{"type": "file", "path": p, "size": len(d), "oid": _oid(d)} for p, d in sorted(files.items())]
            return _json(entries)
        data = files["/".join(rest[1:])]
        return 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit}, data


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def serve(hub: SmallHub) -> Iterator[SmallHub]:
    """Serve a hub in a thread within this context, and set its `endpoint`, which HF_ENDPOINT has to be."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, body = hub.respond(path, token)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
