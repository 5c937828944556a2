"""A fake Hugging Face hub on a loopback port, which has one model in one revision."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789" * 4


@contextmanager
def fake_hub(
    repo: str, revision: str, directory: Path, *, without: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address, and a list of requests. without: a file that the hub lacks."""
    requests: list[str] = []
    names = [path.name for path in directory.iterdir() if path.name != without]
    information = json.dumps(
        {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
    )

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            requests.append(path)
            files = {
                f"/{repo}/resolve/{revision_name}/{name}": name
                for revision_name in (revision, COMMIT)
                for name in names
            }
            if path == f"/api/models/{repo}/revision/{revision}":
                self.answer(information.encode())
            elif path in files:
                self.answer((directory / files[path]).read_bytes(), files[path])
            else:
                has_revision = not {revision, COMMIT}.isdisjoint(path.split("/"))
                missing = "Entry" if has_revision else "Revision" if repo in path else "Repo"
                self.answer(b"", status=404, error=f"{missing}NotFound")

        do_HEAD = do_GET

        def answer(self, body: bytes, name: str = "", status: int = 200, error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            if name:
                self.send_header("ETag", f'"{name}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address, requests


@contextmanager
def hub_that_hangs_up() -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            requests.append(self.rfile.readline().decode())

    with running(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as address:
        yield address, requests


@contextmanager
def running(server: socketserver.TCPServer) -> Iterator[str]:
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
