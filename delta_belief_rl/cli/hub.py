"""The Hugging Face hub: the one place that speaks to it.

The token is the hub's own affair (``HF_TOKEN`` or its login); it is no argument of anything here,
and what the hub answers is printed without it. ``HF_ENDPOINT`` names another hub.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    get_session,
    get_token,
    set_client_factory,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils import logging as hub_logging

from delta_belief_rl.types import UserError

TIMEOUT_S = 60.0
"""Without a byte from the hub for this long, a call has failed."""
AGAIN = (408, 409, 412, 425, 429)
"""Answers, besides those of 500 and more, after which the same call may do; 409 and 412 mean that
somebody else changed the repository meanwhile."""

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Of the HTTP library, which is another one from one version of the hub's client to the next."""

T = TypeVar("T")


class HubAway(Exception):
    """The hub cannot be reached, or answered with errors as long as it was asked."""


class _Busy(Exception):
    """An answer that may be another one later."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a call is tried, and how long it waits in between.

    Attributes:
        tries: Calls in all.
        first_s: Mean wait before the second try; it doubles with each further one.
        longest_s: Longest wait, unless the hub asks for a longer one by ``Retry-After``.
    """

    tries: int = 8
    first_s: float = 2.0
    longest_s: float = 300.0

    def wait(self, failures: int, asked_s: float | None) -> float:
        """Seconds to wait after so many failures; never less than the hub asks for."""
        mean = min(self.first_s * 2.0 ** (failures - 1), self.longest_s)
        # Spread, so that many runs that failed together do not come back together.
        spread = mean * random.uniform(0.5, 1.5)
        return spread if asked_s is None else asked_s + 0.1 * spread


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its bytes, and the checksum that the hub lists for it."""

    size: int
    sha256: str | None
    blob_id: str

    def holds(self, path: Path, sha256: str | None = None) -> bool:
        """Whether a local file has the same content.

        Args:
            path: The local file.
            sha256: Its checksum, where it is known already.
        """
        if path.stat().st_size != self.size:
            return False
        if self.sha256 is not None:
            return self.sha256 == (sha256 or _sha256(path))
        # A file that git keeps itself is listed by git's own checksum only.
        head = f"blob {self.size}\0".encode()
        return hashlib.sha1(head + path.read_bytes()).hexdigest() == self.blob_id


class Hub:
    """One repository of models.

    Args:
        repo_id: ``owner/name``.
        say: Told about each wait.
        patience: Of every call.

    Raises:
        UserError: ``HF_ENDPOINT`` is no address.
    """

    def __init__(
        self, repo_id: str, say: Callable[[str], None], patience: Patience | None = None
    ) -> None:
        self.repo_id = repo_id
        self._say = say
        self._patience = patience or Patience()
        disable_progress_bars()
        # What the libraries log names addresses that hold signatures.
        hub_logging.set_verbosity_error()
        # The library waits for ever unless it is told not to.
        client = get_session()
        kind, hooks = type(client), client.event_hooks
        logging.getLogger(kind.__module__.partition(".")[0]).setLevel(logging.WARNING)
        set_client_factory(
            lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=TIMEOUT_S)
        )
        endpoint = os.environ.get("HF_ENDPOINT") or None
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise UserError(f"HF_ENDPOINT={endpoint} is no web address: give https://...")
        self._api = HfApi(endpoint=endpoint)

    def create(self, private: bool) -> None:
        """Make the repository; one that is there stays as it is.

        Raises:
            UserError: The hub refuses.
            HubAway: It cannot be reached.
        """
        self._try(lambda: self._api.create_repo(self.repo_id, private=private, exist_ok=True))

    def revision(self) -> str:
        """The commit that the repository is at.

        Raises:
            UserError: There is no such repository, or the hub refuses.
            HubAway: It cannot be reached.
        """
        return str(self._try(lambda: self._api.repo_info(self.repo_id)).sha)

    def files(self, folder: str = "", revision: str | None = None) -> dict[str, RemoteFile]:
        """Files below a folder by path; empty when there is no such folder or no repository.

        Raises:
            UserError: The hub refuses.
            HubAway: It cannot be reached.
        """

        def ask() -> dict[str, RemoteFile]:
            try:
                entries = list(
                    self._api.list_repo_tree(
                        self.repo_id, folder or None, recursive=True, revision=revision
                    )
                )
            except (EntryNotFoundError, RevisionNotFoundError):
                return {}
            except RepositoryNotFoundError as error:
                # The hub's answer to whom it does not know is the same error, as 401.
                if error.response.status_code != 404:
                    raise
                return {}
            found = [entry for entry in entries if isinstance(entry, RepoFile)]
            return {
                entry.path: RemoteFile(
                    entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id
                )
                for entry in found
            }

        return self._try(ask)

    def commit(
        self,
        message: str,
        content: Mapping[str, Path | bytes],
        is_done: Callable[[], bool],
    ) -> bool:
        """Put files into the repository by one commit.

        Args:
            content: A local file, or bytes, by path in the repository.
            is_done: Asked before every try after the first; true when the repository has it all,
                because a commit can get through without its answer.

        Returns:
            Whether a try got its answer.

        Raises:
            UserError: The hub refuses.
            HubAway: It cannot be reached.
        """
        tried = False

        def send() -> bool:
            nonlocal tried
            if tried and is_done():
                return False
            tried = True
            self._api.create_commit(
                self.repo_id,
                [CommitOperationAdd(path, source) for path, source in content.items()],
                commit_message=message,
            )
            return True

        return self._try(send)

    def download(self, path: str, folder: Path, revision: str) -> Path:
        """Fetch a file to ``folder/path``.

        Raises:
            UserError: The hub refuses.
            HubAway: It cannot be reached.
        """
        return Path(
            self._try(
                lambda: self._api.hf_hub_download(
                    self.repo_id, path, revision=revision, local_dir=folder
                )
            )
        )

    def _try(self, call: Callable[[], T]) -> T:
        for failures in range(1, self._patience.tries + 1):
            try:
                return self._once(call)
            except _Busy as error:
                if failures == self._patience.tries:
                    raise HubAway(
                        f"The hub did not do what was asked in {failures} tries ({error})."
                    ) from error
                wait = self._patience.wait(failures, error.wait_s)
                self._say(f"{error}; trying again in {wait:.0f} s")
                time.sleep(wait)
        raise AssertionError("a call is tried at least once")

    def _once(self, call: Callable[[], T]) -> T:
        """Call, with every failure sorted into those that time mends and those that it does not."""
        try:
            return call()
        except UserError:
            raise
        except OfflineModeIsEnabled as error:
            raise UserError("HF_HUB_OFFLINE is set: unset it to reach the hub.") from error
        except HFValidationError as error:
            raise UserError(
                f"{self.repo_id!r} is no name of a repository: give owner/name."
            ) from error
        except HfHubHTTPError as error:
            raise self._sorted(error) from error
        except LocalEntryNotFoundError as error:
            # How a download says that it could not even ask.
            raise self._cause(error) from error
        except _HTTP_ERROR as error:
            raise _Busy(f"no answer from the hub ({type(error).__name__})") from error
        except RuntimeError as error:
            # How an upload wraps what happened to one file.
            if not isinstance(error.__cause__, _HTTP_ERROR):
                raise
            raise self._cause(error) from error
        except (FileMetadataError, ValueError) as error:
            said = without_token(" ".join(str(error).split())[:160])
            raise UserError(
                f"What the hub answers for {self.repo_id} cannot be used ({said}): check "
                "HF_ENDPOINT, and look at the repository's page."
            ) from error

    def _cause(self, error: BaseException) -> Exception:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            return self._sorted(cause)
        return _Busy(f"no answer from the hub ({type(cause or error).__name__})")

    def _sorted(self, error: HfHubHTTPError) -> Exception:
        status = error.response.status_code
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            return UserError(
                f"The hub refuses {self.repo_id} ({status}): check the name, and log in with a "
                "token that may write there (HF_TOKEN, or the command hf auth login)."
            )
        if status in AGAIN or status >= 500:
            return _Busy(f"the hub answers {status}", _retry_after(error))
        said = without_token(" ".join((error.server_message or "").split())[:160])
        return UserError(
            f"The hub refuses what was asked of {self.repo_id} ({status}"
            f"{': ' + said if said else ''}): look at the repository's page."
        )


def without_token(text: str) -> str:
    """The text with the hub's token, should it be there, struck out."""
    token = get_token()
    return text.replace(token, "***") if token else text


def _retry_after(error: HfHubHTTPError) -> float | None:
    """Seconds that the hub asks to wait, None where it asks for none or names a date."""
    text = error.response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
