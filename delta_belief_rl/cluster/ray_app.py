"""Starting and stopping Ray: private by default, with a short scratch path."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from delta_belief_rl.cluster.machines import find_machines
from delta_belief_rl.cluster.network import address_of, communication_env, describe
from delta_belief_rl.cluster.ray_env import EVERY_START, OWN_HEAD, OWN_TOKEN
from delta_belief_rl.cluster.ray_watch import watched
from delta_belief_rl.cluster.reaper import MARK, Reaper
from delta_belief_rl.cluster.scratch import make_scratch, note_owner
from delta_belief_rl.cluster.stacks import FOLDER
from delta_belief_rl.config.plan import MachineNeeds
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.obs.exits import Terminated, exit_on_sigterm
from delta_belief_rl.types import UserError


@contextmanager
def ray_session(
    settings: RayInit,
    num_cpus: int,
    num_gpus: int,
    on_lost: Callable[[BaseException], None] = lambda _: None,
    needs: MachineNeeds | None = None,
) -> Iterator[None]:
    """A Ray instance for the length of the block.

    Args:
        settings: ``address="local"`` starts a private instance in a private folder, which is
            removed afterwards; any other address joins a running cluster and leaves it running.
        num_cpus: Logical CPUs that a private instance has at least: one for each worker.
        num_gpus: GPUs of the run.
        on_lost: Told by a ``RayLost``, from another thread, that Ray is gone under the run, or
            one of its machines.
        needs: The machines of a cluster that is joined; one with all of the GPUs unless given.

    Raises:
        UserError: The folder is too long for Ray, the cluster is one that a run cannot use, or
            there is no such network interface.
    """
    address = _address(settings)
    for name, value in EVERY_START.items():
        os.environ.setdefault(name, value)
    if settings.address != "local":
        _join(settings.address)
        try:
            machines = find_machines(needs or MachineNeeds(1, num_gpus))
            with watched(on_lost, machines):
                yield
        finally:
            ray.shutdown()
        return
    for name, value in OWN_HEAD.items():
        os.environ.setdefault(name, value)
    _keep_own_token()
    folder, private = make_scratch(settings.temp_dir or os.environ.get("RAY_TMPDIR"))
    with _nothing_left(folder, private=private):
        with _own_sigterm():
            ray.init(
                address="local",
                num_cpus=max(num_cpus, settings.num_cpus or 0),
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                _node_ip_address=address,
            )
        print(f"network: {describe(ray.util.get_node_ip_address())}", file=sys.stderr)
        with watched(on_lost):
            yield


def _keep_own_token() -> None:
    """Let this process and its workers have a secret of their own to know each other by.

    Ray would write one into the home folder, which may not be writable, and two first starts at
    once would overwrite each other's.
    """
    if not any(os.environ.get(name) for name in OWN_TOKEN):
        os.environ[OWN_TOKEN[0]] = secrets.token_hex(32)


def _address(settings: RayInit) -> str | None:
    """The address of the wanted interface, to which NCCL and gloo are bound as well."""
    if settings.interface is None:
        return None
    if settings.address != "local":
        raise UserError(
            "ray_init.interface is for a private Ray, and a joined cluster has chosen already: set "
            "ray_init.interface=null or ray_init.address=local."
        )
    address = address_of(settings.interface)
    os.environ.update(communication_env(settings.interface))
    return address


def _join(address: str) -> None:
    """Connect this process with a running cluster."""
    if address == "auto" and not os.environ.get("RAY_ADDRESS"):
        raise UserError(
            "ray_init.address=auto joins the Ray cluster that the environment variable RAY_ADDRESS "
            "names, which is not set: set it, or ray_init.address=local."
        )
    try:
        with _own_sigterm():
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except ConnectionError as error:
        where = os.environ["RAY_ADDRESS"] if address == "auto" else address
        raise UserError(
            f"There is no Ray cluster at {where} (ray_init.address={address}): start it, or set "
            "ray_init.address=local."
        ) from error


@contextmanager
def _nothing_left(folder: Path, *, private: bool) -> Iterator[None]:
    """Every process that the block starts is gone after it, however this process ends.

    Args:
        folder: Ray's scratch folder.
        private: It is removed as well; of a folder that the user named only what is the run's own.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    stacks = folder / f"stacks-{mark}"
    reaper = Reaper(mark, [folder if private else stacks])
    if private:
        note_owner(folder, mark)
    stacks.mkdir()
    own = {MARK: mark, FOLDER: str(stacks)}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        try:
            ray.shutdown()
        finally:
            for name in own:
                del os.environ[name]
            os.environ.update(before)
            reaper.finish()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Takes SIGTERM back from Ray, whose handler drains a node for its own ends."""
    try:
        yield
    except SystemExit as error:
        # Nothing but that handler leaves Ray's start in this way.
        raise Terminated from error
    finally:
        exit_on_sigterm()
