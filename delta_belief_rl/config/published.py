"""The task files of the published experiments: names, sizes, checksums and where they come from.

None of them is part of this project. ``delta-belief data fetch`` copies them into
``config.paths.published_folder``, where ``config.paths.find_file`` finds them under the paths that
the published launch lines name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMMIT = "4f1b065a23e06e268820f86270300ddcb64a6125"
BASE_URL = f"https://raw.githubusercontent.com/bethgelab/delta-belief-rl/{COMMIT}"
"""Where the files are published: the reference implementation's repository at one commit."""

PACKAGE_NAME = "delta_belief_rl"
FORMER_NAME = "learning_to_ask"
"""The reference's package had this name once, and the published GRPO launch lines still use it."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One task file.

    Attributes:
        path: Below the repository's root, as the launch lines name it.
        size: Bytes; None where it is not on record.
        sha256: Of the whole file, in hexadecimal; None where it is not on record.
    """

    path: str
    size: int | None = None
    sha256: str | None = None


def _twenty_questions(name: str, size: int | None = None, sha: str | None = None) -> PublishedFile:
    return PublishedFile(f"{PACKAGE_NAME}/env/twenty_questions/direct/{name}", size, sha)


def _paprika(env: str, size: int, sha: str) -> PublishedFile:
    return PublishedFile(f"{PACKAGE_NAME}/env/{env}/direct/paprika/test.parquet", size, sha)


FILES: tuple[PublishedFile, ...] = (
    _twenty_questions(
        "coca_plus/train_rl.parquet",
        39452,
        "d7452ca44c4b3faa57bfe164d16abf5d89f208b1ead5cd1c1bb05322c187e95f",
    ),
    _twenty_questions(
        "coca_plus/val.parquet",
        17218,
        "0b95eda94e2bbdc70c0e686e24f105f110968ebd44cac047e224fd1a0b6b3e71",
    ),
    _twenty_questions(
        "coca_plus/test.parquet",
        23698,
        "cbf0fd4b5a3400b7c5a97df8525e025134fac2f46787e1ceba21d1ae22e5e04d",
    ),
    _twenty_questions("coca/rl_training.parquet"),
    _twenty_questions("coca/test.parquet"),
    _paprika(
        "guess_my_city",
        19322,
        "c9119acd2b5a254eda95af200f87eda691ce591cf7b252a5116bc0ec137a3005",
    ),
    _paprika(
        "murder_mystery",
        73324,
        "4fe959a854d30916bc67a09bef2a2d79a902b232717430fd17f80de62cf32e82",
    ),
    _paprika(
        "customer_service",
        70423,
        "011df46a889d112f1d10c419985655b508dba229343d4b2624c61a9adfacb7ac",
    ),
)
"""Every file that a published launch line or a published default names."""

_BY_PATH: Mapping[str, PublishedFile] = {file.path: file for file in FILES}


def current_name(path: str) -> str:
    """A published path with the package's present name in front.

    Example:
        >>> current_name("learning_to_ask/env/x.parquet")
        'delta_belief_rl/env/x.parquet'
    """
    former = f"{FORMER_NAME}/"
    return f"{PACKAGE_NAME}/{path.removeprefix(former)}" if path.startswith(former) else path


def published_file(path: str) -> PublishedFile | None:
    """The file that a path of the configuration names; None where it is no published one."""
    return _BY_PATH.get(current_name(path.removeprefix("./")))


NOTICE = """\
The files below this folder are task files of the published delta-belief-rl experiments
(https://github.com/bethgelab/delta-belief-rl). They are not part of the project that fetched them.
The scenarios of guess_my_city, murder_mystery and customer_service come from PAPRIKA
(arXiv 2502.17543); see its terms before passing them on.

MIT License

Copyright (c) 2026 Bethge Lab

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES
OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
"""Terms of the files, written beside them."""
