"""What every start of Ray has in its environment, and how long its folder's path may be."""

from __future__ import annotations

HEAD_GONE_SECONDS = 20
"""Seconds after which a driver and its workers give up a head of Ray that does not answer."""

SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""

LONGEST_SOCKET = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Bytes that Ray appends to its scratch folder."""

EVERY_START = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray lowers the priority of its workers by default; here they do all of the work.
    "RAY_worker_niceness": "0",
}
"""Where the user has not said otherwise."""

OWN_HEAD = {
    # Without its head a run can do nothing, and Ray would wait for it for a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_GONE_SECONDS),
}
"""The same, of a Ray that is the run's own."""

OWN_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
"""How a user tells Ray what its processes know each other by; the first one holds the secret."""


def is_short(folder: str) -> bool:
    """Whether Ray's sockets fit below a folder."""
    return len(folder.encode()) + LONGEST_SOCKET <= SOCKET_PATH_LIMIT
