"""A running server that cannot be looked at: no way to it, no answer, no key, or not ready. The advice on each is in
rules/data/probe_address.toml.

Knows the answers of one address and no figure of metrics. Asks no server anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.doctor.build_finding import judged
from holdfast.doctor.findings import Finding
from holdfast.doctor.probe.metrics_page import CONNECT_TIMEOUT_S, OK, Reply
from holdfast.errors import printable
from holdfast.units import shorten

KEY_WANTED = (401, 403)
KEY_VARIABLE = "HOLDFAST_API_KEY"


def _finding(
    about: str, address: str, lines: Sequence[str], numbers: Mapping[str, float], named: str | None = None
) -> Finding:
    """The first of its rules that holds."""
    scheme, _, rest = address.partition("://")
    words = {
        "address": address,
        "other": f"{'http' if scheme == 'https' else 'https'}://{rest}",
        # Ends by itself, within ten minutes.
        "wait": f"curl -sf -o /dev/null --retry 120 --retry-delay 5 --retry-all-errors {address}/health",
        "variable": KEY_VARIABLE,
        "connect_timeout_s": CONNECT_TIMEOUT_S,
    }
    return next(judged(about, numbers, words, source=address, named=named, lines=lines))


def unreachable(address: str, reply: Reply) -> Finding:
    """Nobody answered; `reply.failure` is how."""
    line = f"GET {address}/health: {printable(shorten(reply.said, 200))}"
    plain = "wrong version number" in reply.said.lower().replace("_", " ")
    return _finding("unreachable", address, [line], {"plain_http": plain}, reply.failure)


def key_wanted(address: str, refused: Sequence[tuple[str, int]], *, given: bool) -> Finding:
    """`refused`: what was asked, as GET /path, and the status of its answer."""
    how = "with the key given" if given else "no key was given"
    lines = [
        f"{asked} of {address}: {status} {'Unauthorized' if status == 401 else 'Forbidden'} ({how})"
        for asked, status in refused
    ]
    return _finding("key", address, lines, {"given": given, "status": refused[0][1]})


def stream_failed(address: str, status: int) -> Finding:
    """It says that it serves, and an answer fails."""
    line = f"POST {address}/v1/completions, one short streamed answer: {status}"
    return _finding("stream_failed", address, [line], {"status": status})


def not_ready(address: str, status: int, said: str) -> Finding:
    """The server answered, and what it says of itself is not that it serves; `said`: its own word for it."""
    line = f"GET {address}/health: {status} {said}".rstrip()
    return _finding("health", address, [line], {said: 1, "status": status})


def asleep(health: Reply, told: Reply) -> bool:
    """By Holdfast's /health, or by /is_sleeping, which vLLM has too."""
    return health.json().get("status") == "sleeping" or (told.status == OK and told.json().get("is_sleeping") is True)
