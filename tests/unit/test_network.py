"""The network interface of a run: one of the machine's, its address, and one sentence otherwise."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext

import pytest

from delta_belief_rl.cluster import ray_app
from delta_belief_rl.cluster.network import address_of, describe, interfaces
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.types import UserError


def loopback() -> str:
    return next(name for name, address in interfaces().items() if address == "127.0.0.1")


def test_N5_the_address_is_one_that_the_machine_can_listen_on() -> None:
    for name, address in interfaces().items():
        assert address_of(name) == address
        with socket.socket() as listener:
            listener.bind((address, 0))
    assert describe("127.0.0.1") == f"{loopback()} (127.0.0.1)"
    assert describe("192.0.2.1") == "unknown interface (192.0.2.1)"


def test_N5_an_unknown_interface_is_refused_with_those_that_there_are() -> None:
    with (
        pytest.raises(UserError, match=r"interface=nosuch0 .* \(127\.0\.0\.1\)") as refused,
        ray_session(RayInit(interface="nosuch0"), 1, 0),
    ):
        pass
    assert "\n" not in str(refused.value)
    with (
        pytest.raises(UserError, match="joined cluster"),
        ray_session(RayInit(interface=loopback(), address="10.0.0.1:6379"), 1, 0),
    ):
        pass


def test_N5_ray_nccl_and_gloo_are_given_the_interface_and_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, object] = {}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "other0")
    monkeypatch.setattr(ray_app.ray, "init", lambda **words: given.update(words))
    monkeypatch.setattr(ray_app.ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_app, "watched", lambda on_lost: nullcontext())
    monkeypatch.setattr(ray_app.ray.util, "get_node_ip_address", lambda: given["_node_ip_address"])
    with ray_session(RayInit(interface=loopback()), 1, 0):
        assert given["_node_ip_address"] == "127.0.0.1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={loopback()}"
        assert os.environ["GLOO_SOCKET_IFNAME"] == loopback()
    assert capsys.readouterr().err == f"network: {loopback()} (127.0.0.1)\n"
