"""A hub on this machine: folders of models and data sets, served as huggingface.co serves repositories.

``HF_ENDPOINT`` names it, as it names a mirror.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REST = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
"""Further fields of a repository."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: Any, root: Path) -> None:
        self._root = root
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self._serve(parse_qs(body).get("paths") or json.loads(body or "{}").get("paths", []))

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def _serve(self, paths: list[str] | None = None) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = words[0] == "api"
        words = words[is_api:]
        kind = words.pop(0) if words[0] in ("models", "datasets") else "models"
        folder = self._root / kind / "/".join(words[:2])
        if words[0] == "gated":
            self._refuse("GatedRepo", 403)
        elif not folder.is_dir():
            self._refuse("RepoNotFound")
        elif not is_api:
            self._send_file(folder / "/".join(words[4:]))
        elif words[2:3] == ["tree"]:
            within = folder / "/".join(words[4:])
            is_recursive = "recursive=true" in self.path.lower()
            self._send_json(
                [_entry(path, folder) for path in sorted(within.rglob("*") if is_recursive else within.glob("*"))]
            )
        elif words[2:3] == ["paths-info"]:
            self._send_json([_entry(folder / path, folder) for path in paths or () if (folder / path).exists()])
        else:
            files = [{"rfilename": str(path.relative_to(folder))} for path in folder.rglob("*") if path.is_file()]
            self._send_json({"id": "/".join(words[:2]), "sha": COMMIT, "siblings": files, **_REST})

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._refuse("EntryNotFound")
            return
        content = path.read_bytes()
        etag = sha256(content).hexdigest()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self._send(
            206 if start else 200,
            content[start:],
            {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"},
        )

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str, status: int = 404) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": f"{code}: {self.path}"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """What the hub tells of a file or a folder."""
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": COMMIT}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": sha1(path.read_bytes()).hexdigest()}


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Serve ``root/models/OWNER/NAME`` and ``root/datasets/OWNER/NAME``; yields the address.

    Models of the owner ``gated`` are there for those who were given access, i.e. for nobody.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root=root))
    Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
