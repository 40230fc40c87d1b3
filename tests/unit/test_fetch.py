"""Fetching the published task files, from a server of this machine that stands in for GitHub."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from delta_belief_rl.cli.fetch import Fetched, fetch
from delta_belief_rl.cli.main import main
from delta_belief_rl.config import paths
from delta_belief_rl.config.paths import find_file, published_folder
from delta_belief_rl.config.published import BASE_URL, FILES, PublishedFile, published_file
from delta_belief_rl.envs.parquet import write_parquet
from delta_belief_rl.envs.secrets import make_tasks
from delta_belief_rl.types import UserError
from tests.runs import ROOT

DATA = ROOT.parent / "shared" / "data" / "envs"
NAME = "delta_belief_rl/env/twenty_questions/direct/coca_plus/val.parquet"


@dataclass
class Site:
    """What the server has and how it behaves.

    Attributes:
        cut: Bytes after which the next answer breaks off; None for a whole one.
        ranges: Whether it can go on from a place inside a file.
        asked: Path and range of every request.
    """

    content: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        site, wanted = self.site, self.headers.get("Range")
        site.asked.append((self.path, wanted))
        data = site.content.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
        if start and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : site.cut])
        site.cut = None

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    path = tmp_path / "source.parquet"
    write_parquet(path, make_tasks(["owl", "fox", "elk"], "val"))
    return path.read_bytes()


@pytest.fixture
def site(content: bytes) -> Iterator[Site]:
    site = Site({f"/at/{NAME}": content})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, site))
    site.url = f"http://127.0.0.1:{server.server_port}/at/"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()


def known(content: bytes) -> PublishedFile:
    return PublishedFile(NAME, len(content), hashlib.sha256(content).hexdigest())


def bring(file: PublishedFile, folder: Path, url: str) -> list[Fetched]:
    return fetch([file], folder, url, lambda _: None)


def files_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_file_is_fetched_checked_and_kept(site: Site, content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first = bring(known(content), folder, site.url)
    assert [(f.new, f.verified, f.size) for f in first] == [(True, True, len(content))]
    assert (folder / NAME).read_bytes() == content
    assert files_in(folder) == {NAME, "LICENSE"}
    again = bring(known(content), folder, site.url)
    assert [(f.new, f.verified) for f in again] == [(False, True)]
    assert len(site.asked) == 1


def test_the_terms_of_the_files_lie_beside_them(site: Site, content: bytes, tmp_path: Path) -> None:
    bring(known(content), tmp_path / "new", site.url)
    text = (tmp_path / "new" / "LICENSE").read_text()
    assert "MIT License" in text
    assert "Copyright (c) 2026 Bethge Lab" in text


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_broke_off_goes_on_where_it_was(
    ranges: bool, site: Site, content: bytes, tmp_path: Path
) -> None:
    folder, site.cut, site.ranges = tmp_path / "new", 1000, ranges
    with pytest.raises(UserError, match="cannot be fetched") as caught:
        bring(known(content), folder, site.url)
    assert "run the command again" in str(caught.value)
    part = (folder / NAME).with_name(".val.parquet.part")
    assert part.read_bytes() == content[:1000]
    assert not (folder / NAME).exists()
    bring(known(content), folder, site.url)
    assert site.asked[-1][1] == "bytes=1000-"
    assert (folder / NAME).read_bytes() == content
    assert not part.exists()


def test_a_part_longer_than_the_file_is_begun_anew(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    part = (tmp_path / NAME).with_name(".val.parquet.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(content + b"more")
    bring(known(content), tmp_path, site.url)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_finished_part_needs_no_connection(content: bytes, tmp_path: Path) -> None:
    part = (tmp_path / NAME).with_name(".val.parquet.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    bring(known(content), tmp_path, "http://127.0.0.1:9/")
    assert (tmp_path / NAME).read_bytes() == content


def test_other_content_is_refused_and_not_put_in_place(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    good = known(content)
    changed = bytearray(content)
    changed[100] ^= 1
    for wrong, part in (
        (bytes(changed), "has another checksum"),
        (content[:4] + content[8:], f"bytes, not {len(content):,}"),
        (b"<html>not here</html>", "is not a parquet file"),
    ):
        site.content[f"/at/{NAME}"] = wrong
        with pytest.raises(UserError, match=part):
            bring(good, tmp_path / "new", site.url)
        assert files_in(tmp_path / "new") == {"LICENSE"}


def test_a_file_without_a_checksum_on_record_is_told(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    found = bring(PublishedFile(NAME), tmp_path / "new", site.url)
    assert [(f.new, f.verified) for f in found] == [(True, False)]


def test_a_different_file_that_is_there_is_left_alone(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    target = tmp_path / NAME
    target.parent.mkdir(parents=True)
    target.write_bytes(b"PAR1 mine PAR1")
    with pytest.raises(UserError, match="is there already and has 14 bytes"):
        bring(known(content), tmp_path, site.url)
    assert target.read_bytes() == b"PAR1 mine PAR1"
    assert site.asked == []


def test_no_network_no_file_and_no_address_are_one_sentence_each(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    for url, part in (
        ("http://127.0.0.1:9", "cannot be fetched"),
        ("http://no-such-host.invalid/x", "check the connection"),
        (f"{site.url}elsewhere", "answers 404"),
        ("ftp://example.org", "is no web address"),
    ):
        with pytest.raises(UserError, match=part) as caught:
            bring(known(content), tmp_path / "new", url)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "new" / NAME).exists()


def test_a_folder_that_cannot_be_written_is_named(
    site: Site, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        bring(known(content), tmp_path / "file", site.url)


# --- the command, and where the files are found -------------------------------------------------


def test_the_command_and_the_script_fetch_by_published_name(
    site: Site, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "delta_belief_rl/env/twenty_questions/direct/coca/test.parquet"  # no checksum on record
    site.content[f"/at/{name}"] = content
    options = ["--base-url", site.url, "--folder", str(tmp_path / "new")]
    assert main(["data", "fetch", name, "--json", *options]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)[0]["file"] == str(tmp_path / "new" / name)
    assert shown.err == f"fetched {tmp_path / 'new' / name}\n"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "data" / "fetch_published.py"), name, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 published files" in done.stdout
    assert done.stderr.startswith("kept ")
    assert main(["data", "fetch", "x.parquet", *options]) == 2
    assert "is no published file" in capsys.readouterr().err
    elsewhere = ["--base-url", "http://127.0.0.1:9", "--folder", str(tmp_path / "other")]
    assert main(["data", "fetch", NAME, *elsewhere]) == 2


def test_fetched_files_are_found_under_both_published_names(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "published_folder", lambda: tmp_path / "published")
    monkeypatch.chdir(tmp_path)
    former = NAME.replace("delta_belief_rl/", "learning_to_ask/", 1)
    assert find_file(NAME) == Path(NAME)
    assert find_file(former) == Path(former)
    target = tmp_path / "published" / NAME
    target.parent.mkdir(parents=True)
    target.write_bytes(content)
    assert find_file(NAME) == find_file(former) == target
    # A file of the working folder comes first.
    (tmp_path / NAME).parent.mkdir(parents=True)
    (tmp_path / NAME).write_bytes(content)
    assert find_file(NAME) == Path(NAME)


def test_an_installed_package_keeps_fetched_files_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert published_folder() == ROOT / "data" / "published"
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "site-packages" / "delta_belief_rl")
    monkeypatch.setenv("DELTA_BELIEF_CACHE", str(tmp_path / "cache"))
    assert published_folder() == tmp_path / "cache" / "published"


def test_the_record_of_the_published_files_is_that_of_the_files() -> None:
    if not DATA.exists():
        pytest.skip("no ../shared/data beside this clone: the published files are not here")
    seen = 0
    for file in FILES:
        env, name = file.path.split("/")[2], Path(file.path).name
        path = DATA / env / name
        if file.sha256 is None or not path.exists():
            continue
        seen += 1
        assert path.stat().st_size == file.size
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    assert seen == 6


def test_every_published_path_of_the_configurations_can_be_fetched() -> None:
    text = "".join(file.read_text() for file in sorted((ROOT / "configs").rglob("*.yaml")))
    named = set(re.findall(r"delta_belief_rl/env/[\w/]+\.parquet", text))
    assert len(named) > 5
    assert [path for path in named if published_file(path) is None] == []
    assert BASE_URL.startswith("https://")
