"""A Hugging Face hub on this machine: repositories of models over HTTP, and the ways it can fail.

It answers the calls that ``huggingface_hub`` makes for creating a repository, listing it, uploading
by the LFS protocol, committing and downloading. Files of text below 10 MB are kept as git keeps
them, everything else is LFS, as on the real one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stands_for_a_real_token"
REGULAR = (".json", ".md", ".txt", ".gitattributes")


@dataclass
class Fault:
    """What happens to the next calls of one kind.

    Attributes:
        kind: Of call: ``create``, ``info``, ``tree``, ``preupload``, ``batch``, ``put``,
            ``commit``, ``resolve``.
        times: How many calls.
        status: The answer; 0 drops the connection without one, -1 says nothing until ``released``.
        retry_after: Seconds, or None for no such header.
        after: The call does its work first.
    """

    kind: str
    times: int = 1
    status: int = 500
    retry_after: int | None = None
    after: bool = False


@dataclass
class Repository:
    """Files by path, as bytes, and one message for each commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


@dataclass
class FakeHub:
    """State of the server.

    Attributes:
        objects: LFS objects by checksum, those of no commit among them.
        calls: Kind of every call, in order.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    released: Event = field(default_factory=Event)
    stalled: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def fault(self, kind: str) -> Fault | None:
        """The fault that this call meets, used up by one."""
        with self.lock:
            self.calls.append(kind)
            for fault in self.faults:
                if fault.kind == kind and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def count(self, kind: str) -> int:
        return self.calls.count(kind)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: FakeHub, *args: object) -> None:
        self.hub = hub
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    # --- routes

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._chunks()
        else:
            self.body = self.rfile.read(length)
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        kind = self._kind(parts)
        fault = self.hub.fault(kind)
        if fault is not None and not fault.after:
            self._fail(fault)
            return
        if kind != "put" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            said = "Invalid credentials in Authorization header"
            self._send(401, {"error": said}, {"X-Error-Message": said})
            return
        answer = getattr(self, f"_{kind}")(parts)
        if fault is not None:
            self._fail(fault)
            return
        self._send(*answer)

    def _kind(self, parts: list[str]) -> str:
        if parts[:2] == ["api", "repos"]:
            return "create"
        if parts[0] == "objects":
            return "put"
        if parts[-1] == "batch":
            return "batch"
        if parts[0] == "api":
            return parts[4] if len(parts) > 4 and parts[4] != "revision" else "info"
        return "resolve"

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    # --- answers

    def _send(
        self, status: int, content: object = b"", headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, fault: Fault) -> None:
        if fault.status == -1:
            self.hub.stalled.set()
            self.hub.released.wait(60)
        if fault.status <= 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        wait = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        # A hub that tells too much.
        self._send(fault.status, {"error": f"no, {self.headers.get('Authorization')}"}, wait)

    def _missing(self) -> tuple[int, object, dict[str, str]]:
        return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}

    def _repository(self, parts: list[str]) -> Repository | None:
        return self.hub.repositories.get("/".join(parts[2:4]))

    def _create(self, parts: list[str]) -> tuple[int, object]:
        body = json.loads(self.body)
        name = f"{body['organization']}/{body['name']}"
        if name in self.hub.repositories:
            return 409, {"error": "You already created this model repo", "url": name}
        private = body.get("visibility") == "private" or body.get("private") is True
        self.hub.repositories[name] = Repository(private, {".gitattributes": b""}, ["first"])
        return 200, {"url": f"{self.hub.url}/{name}"}

    def _info(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        found = self._repository(parts)
        if found is None:
            return self._missing()
        files = [{"rfilename": path} for path in found.files]
        body = {"id": "/".join(parts[2:4]), "sha": found.sha, "siblings": files, "tags": []}
        return 200, body | {"private": found.private}, {}

    def _tree(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        found = self._repository(parts)
        if found is None:
            return self._missing()
        folder = "/".join(parts[6:])
        entries = [
            _entry(path, data)
            for path, data in sorted(found.files.items())
            if not folder or path.startswith(f"{folder}/")
        ]
        if folder and not entries:
            return 404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"}
        return 200, entries, {}

    def _preupload(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        found = self._repository(parts)
        if found is None:
            return self._missing()
        files = [
            {
                "path": file["path"],
                "uploadMode": "regular" if _is_regular(file["path"]) else "lfs",
                "shouldIgnore": False,
                **(
                    {"oid": _entry(file["path"], found.files[file["path"]])["oid"]}
                    if file["path"] in found.files
                    else {}
                ),
            }
            for file in json.loads(self.body)["files"]
        ]
        return 200, {"files": files}, {}

    def _batch(self, parts: list[str]) -> tuple[int, object]:
        objects: list[dict[str, object]] = []
        for asked in json.loads(self.body)["objects"]:
            entry: dict[str, object] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/objects/{asked['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}

    def _put(self, parts: list[str]) -> tuple[int, object]:
        if hashlib.sha256(self.body).hexdigest() != parts[1]:
            return 400, {"error": "another checksum"}
        self.hub.objects[parts[1]] = self.body
        return 200, {}

    def _commit(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        found = self._repository(parts)
        if found is None:
            return self._missing()
        lines = [json.loads(line) for line in self.body.splitlines()]
        values = [(line["key"], line["value"]) for line in lines]
        new: dict[str, bytes] = {}
        for key, value in values[1:]:
            if key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return 400, {"error": f"no object {value['oid']}"}, {}
                new[value["path"]] = self.hub.objects[value["oid"]]
            else:
                new[value["path"]] = base64.b64decode(value["content"])
        with self.hub.lock:
            found.files |= new
            found.commits.append(values[0][1]["summary"])
        url = f"{self.hub.url}/{'/'.join(parts[2:4])}/commit/{found.sha}"
        return 200, {"success": True, "commitOid": found.sha, "commitUrl": url}, {}

    def _resolve(self, parts: list[str]) -> tuple[int, object, dict[str, str]]:
        found = self.hub.repositories.get("/".join(parts[:2]))
        if found is None:
            return self._missing()
        path = "/".join(parts[4:])
        if path not in found.files:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"}
        data = found.files[path]
        entry = _entry(path, data)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        return 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": found.sha}


def _is_regular(path: str) -> bool:
    return os.path.basename(path).endswith(REGULAR)


def _entry(path: str, data: bytes) -> dict[str, object]:
    """As the hub lists a file; an LFS file's ``oid`` is that of its pointer."""
    checksum = hashlib.sha256(data).hexdigest()
    if _is_regular(path):
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": blob}
    lfs = {"oid": checksum, "size": len(data), "pointerSize": 134}
    pointer = hashlib.sha1(checksum.encode()).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": pointer, "lfs": lfs}


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A running hub; its ``url`` goes into ``HF_ENDPOINT``."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
