"""A running server that cannot be looked at: no way to it, no answer, no key, or not ready. Each has its own advice.

Knows the answers of one address and no figure of metrics. Asks no server anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.doctor.build_finding import Confidence, found
from holdfast.doctor.findings import Evidence, Finding, Fix, RootCause
from holdfast.doctor.probe.metrics_page import CONNECT_TIMEOUT_S, OK, Reply
from holdfast.errors import printable
from holdfast.units import shorten

KEY_WANTED = (401, 403)
KEY_VARIABLE = "HOLDFAST_API_KEY"
_ROOT: RootCause = "not_memory"
_STATES: dict[str, tuple[str, str, str]] = {
    "sleeping": (
        "the server sleeps: it is alive and computes nothing",
        "/sleep was asked: its memory was given back, and requests are not served until /wake_up",
        "wake it: curl -X POST {address}/wake_up",
    ),
    "draining": (
        "the server is shutting down: it ends what runs and takes nothing new",
        "somebody stopped it, or its service is being replaced: this is an ordered end",
        "send requests to another, or start it again when it has ended; its service's log says who stopped it",
    ),
    "dead": (
        "the server's front answers, and its engine is gone",
        "the engine failed: requests fail until the server is started anew",
        "read its log: holdfast doctor LOG; then start it again",
    ),
    "hung": (
        "the engine does not answer, and the server knows it",
        "its process was stopped, or a step hangs; past --engine-hang-timeout the server kills it and starts another",
        "wait: {wait}; if it hangs again and again, its log says with which request: holdfast doctor LOG",
    ),
    "restarting": (
        "the engine ended and is being started again",
        "the server starts its engine anew by itself; requests fail until then",
        "wait: {wait}; why it ended stands in the log: holdfast doctor LOG",
    ),
}  # fmt: skip
"""What /health calls it: what, why, fix."""


def unreachable(address: str, reply: Reply) -> Finding:
    """Nobody answered; `reply.failure` is how."""
    line = f"GET {address}/health: {printable(shorten(reply.said, 200))}"
    what, why, fix = _WAYS[reply.failure]
    cause, confidence = _CAUSES.get(reply.failure, ("other", "high"))
    if reply.failure == "tls" and "wrong version number" in reply.said.lower().replace("_", " "):
        why = "what listens there speaks plain HTTP"
        fix = "holdfast doctor http://" + address.removeprefix("https://")
    written = {"address": address, "wait": _waiting(address), "other": _other_scheme(address)}
    return found(
        cause,
        _ROOT,
        confidence,
        what=what.format(**written),
        why=why.format(**written),
        evidence=[Evidence(line=line, source=address)],
        fixes=[Fix(why=fix.format(**written))],
    )


def _waiting(address: str) -> str:
    """Ends by itself, within ten minutes."""
    return f"curl -sf -o /dev/null --retry 120 --retry-delay 5 --retry-all-errors {address}/health"


def _other_scheme(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{'http' if scheme == 'https' else 'https'}://{rest}"


_CAUSES: dict[str, tuple[str, Confidence]] = {
    "refused": ("not_ready_yet", "medium"),
    "no_connection": ("timeout_or_hang", "medium"),
    "silent": ("timeout_or_hang", "medium"),
    "broken": ("other", "medium"),
}
_WAYS = {
    "name": (
        "the name in {address} is not known: nothing was asked of any server",
        "DNS or /etc/hosts has no such name on this machine; names of containers and of Kubernetes' services are known"
        " only inside their network",
        "correct the name, or give the address as a number (getent hosts NAME says what it is here); from outside a"
        " cluster: kubectl port-forward svc/NAME 8000:8000, then holdfast doctor 127.0.0.1:8000",
    ),
    "tls": (
        "no TLS connection to {address} came about",
        "something listens there, and its certificate is not trusted here, or it speaks another TLS",
        "for a certificate of your own: SSL_CERT_FILE=ca.pem holdfast doctor {address}; a server without TLS: {other}",
    ),
    "refused": (
        "nothing listens at {address}",
        "the machine is there and its port is closed: the server is still loading, has ended, or listens elsewhere"
        " (most engines open their port only when the model is loaded, or on 127.0.0.1 inside a container)",
        "if its process is gone, look at its log with holdfast doctor LOG; if it runs (ss -ltnp shows its port), wait:"
        " {wait}",
    ),
    "no_route": (
        "no way leads from this machine to {address}",
        "the network says that this address cannot be reached: a wrong address, another network, or a VPN that is off",
        "look at the address and at the way: ip route get ADDRESS; inside a cluster ask from a pod of it",
    ),
    "no_connection": (
        f"nobody answered a connection to {{address}} within {CONNECT_TIMEOUT_S:g} s: the server was not reached",
        "a firewall or security group drops what is sent, the machine is off, or the address is another's: a server"
        " that hangs would still take the connection",
        "try it on the server's own machine: holdfast doctor 127.0.0.1:PORT; if that works, open the port between the"
        " two",
    ),
    "silent": (
        "{address} takes the connection and does not answer",
        "the server hangs, or its front is busy: /health is answered by an engine that is well in milliseconds",
        "read the end of its log (holdfast doctor LOG); py-spy dump --pid PID shows where it is",
    ),
    "broken": (
        "{address} takes the connection and gives no whole HTTP answer",
        "it speaks something else than this scheme (TLS behind http://, another protocol), or ended while it answered",
        "try {other}; if it did answer before, read the end of its log: holdfast doctor LOG",
    ),
}


def key_wanted(address: str, refused: Sequence[tuple[str, int]], *, given: bool) -> Finding:
    """`refused`: what was asked, as GET /path, and the status of its answer."""
    evidence = [
        Evidence(
            line=f"{asked} of {address}: {status} {'Unauthorized' if status == 401 else 'Forbidden'}"
            f" ({'with the key given' if given else 'no key was given'})",
            source=address,
        )
        for asked, status in refused
    ]
    status = refused[0][1]
    return found(
        "other",
        _ROOT,
        "high",
        evidence=evidence,
        what=f"{address} answers {status}: "
        + (
            f"the key in {KEY_VARIABLE} is not one of its keys"
            if given and status == 401
            else "the key given may not ask this"
            if given
            else "it wants a key, and none was given"
        ),
        why="the server is there and asks who you are, so that nothing more can be said of it: this is not memory",
        fixes=[
            Fix(
                why=f"set {KEY_VARIABLE} to the key that the server was started with (--api-key) and ask again:"
                f" {KEY_VARIABLE}=KEY holdfast doctor {address}"
            )
        ],
    )


def stream_failed(address: str, status: int) -> Finding:
    """It says that it serves, and an answer fails."""
    line = f"POST {address}/v1/completions, one short streamed answer: {status}"
    return found(
        "other",
        _ROOT,
        "medium",
        evidence=[Evidence(line=line, source=address)],
        what=f"/health says that the server is well, and a request for one short answer fails ({status})",
        why="its engine is gone or failing, or something between does not reach it: the front alone answers /health",
        fixes=[Fix(why="read the end of its log: holdfast doctor LOG; then start it again")],
    )


def not_ready(address: str, status: int, said: str) -> Finding:
    """The server answered, and what it says of itself is not that it serves; `said`: its own word for it."""
    evidence = [Evidence(line=f"GET {address}/health: {status} {said}".rstrip(), source=address)]
    if 300 <= status < 400 or status == 404:
        return found(
            "other",
            _ROOT,
            "medium",
            evidence=evidence,
            what=f"{address} is no inference server, or sits behind another address",
            why="it answers neither /health nor /v1/models; redirects are not followed",
            fixes=[Fix(why="give the address that the engine itself listens on")],
        )
    if status in (502, 504):
        return found(
            "not_ready_yet",
            _ROOT,
            "medium",
            evidence=evidence,
            what=f"something before the server answers for it ({status}): the server itself does not",
            why="a proxy or load balancer found nobody behind it, or waited in vain",
            fixes=[Fix(why="ask the address that the engine itself listens on, and read its log: holdfast doctor LOG")],
        )
    if said in _STATES:
        what, why, fix = _STATES[said]
        return found(
            "not_ready_yet",
            _ROOT,
            "high",
            evidence=evidence,
            what=what,
            why=why,
            fixes=[Fix(why=fix.format(address=address, wait=_waiting(address)))],
        )
    return found(
        "not_ready_yet",
        _ROOT,
        "high" if status == 503 else "medium",
        evidence=evidence,
        what=f"the server answers, and says that it is not ready ({status})",
        why="it is still loading its model or its engine is gone: requests fail until /health says 200",
        fixes=[Fix(why=f"wait: {_waiting(address)}; if it stays so, read its log: holdfast doctor LOG")],
    )


def asleep(health: Reply, told: Reply) -> bool:
    """By Holdfast's /health, or by /is_sleeping, which vLLM has too."""
    return health.json().get("status") == "sleeping" or (told.status == OK and told.json().get("is_sleeping") is True)
