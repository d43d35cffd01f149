"""How an agent finds the head and joins it: connect, prove the secret, say what the node has. Knows no ranks."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from holdfast.config import EngineConfig
from holdfast.engine.ranks.nodes import messages, secret
from holdfast.engine.ranks.nodes.addresses import named_place
from holdfast.engine.ranks.nodes.hub import HANDSHAKE_S, NODES_MISSING, SAID_EVERY_S, other_secret
from holdfast.engine.ranks.nodes.report import other_protocol, own_version
from holdfast.engine.ranks.nodes.wire import MOST_BEFORE_PROOF, Wire
from holdfast.errors import EngineError, HoldfastError
from holdfast.records import Failure
from holdfast.units import format_duration

log = logging.getLogger("holdfast")

TRY_EVERY_S = 0.5
CONNECT_S = 5.0
JOINED_S = 60.0
"""For the head's answer: it compares what it was told, and may have much to do."""


Report = Callable[[str], messages.NodeReport | Failure]
"""Of a node, for its address; or why it cannot join."""


@contextlib.contextmanager
def head_hears_failure(config: EngineConfig) -> Iterator[None]:
    """Around what a node does before it joins: the head, which waits for it, hears why it does not come."""
    try:
        yield
    except HoldfastError as error:
        tell_cannot_join(config, error)
    except OSError as error:
        tell_cannot_join(config, EngineError(f"node {config.node_rank} cannot read what it needs: {error}"))


def tell_cannot_join(config: EngineConfig, error: HoldfastError) -> NoReturn:
    """Raises it, with the number of the node, when the head knows of it; or as it is, where there is no head."""
    # It may be long until there is a head: whoever looks at this node knows at once.
    place = named_place(config.master_addr, config.master_port)
    log.error("node %d cannot join, which the head at %s is told: %s", config.node_rank, place, error.message)
    try:
        join_head(config, lambda host: Failure.of(error))
    except EngineError as missing:
        if missing.code == NODES_MISSING:
            raise error from None
        raise
    raise AssertionError("the head has let a node in that cannot join")


def join_head(config: EngineConfig, report: Report) -> Wire:
    """A connection to a head that has let this node in. Tries again while there is no head; raises what the head says
    when it refuses."""
    place = named_place(config.master_addr, config.master_port)
    assert config.node_secret is not None
    key = secret.derive_key(config.node_secret)
    began_s, said_s = time.monotonic(), -SAID_EVERY_S  # At once, then now and then.
    while True:
        try:
            return _join(config, key, report)
        except HoldfastError:  # Of which some are OSErrors too.
            raise
        except (OSError, EOFError, msgspec.DecodeError) as error:
            now_s, why = time.monotonic(), _why(error)
            if now_s - said_s >= SAID_EVERY_S:
                said_s = now_s
                log.info("looking for the head at %s: %s", place, why)
            if now_s - began_s >= config.node_timeout:
                raise EngineError(
                    f"node {config.node_rank} has not reached the head at {place}: {why}",
                    code=NODES_MISSING,
                    needed=f"the head within {format_duration(config.node_timeout)}",
                    fix="start the head (--node-rank 0) with the same --master-addr and --master-port, and let this"
                    " machine through to that port",
                ) from error
        time.sleep(TRY_EVERY_S)


def _why(error: Exception) -> str:
    if isinstance(error, msgspec.DecodeError):
        return "what answers there is no head of nodes, or one of a version that is not understood"
    return str(error) or "it has hung up"


def _join(config: EngineConfig, key: bytes, report: Report) -> Wire:
    source = None if config.node_addr is None else (config.node_addr, 0)
    wire = Wire(socket.create_connection((config.master_addr, config.master_port), CONNECT_S, source))
    try:
        _introduce(config, key, wire, report)
    except BaseException:
        wire.close()
        raise
    return wire


def _introduce(config: EngineConfig, key: bytes, wire: Wire, report: Report) -> None:
    wire.wait_at_most(HANDSHAKE_S)
    nonce = os.urandom(messages.NONCE_BYTES)
    wire.send(messages.encode(messages.NodeHello(nonce, version=own_version())))
    challenge = messages.decode_from_head(wire.receive(MOST_BEFORE_PROOF))
    if not isinstance(challenge, messages.Challenge):
        raise OSError("what answers there is no head")
    expected = secret.proof(key, secret.HEAD, nonce, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, expected):
        wire.send(messages.encode(messages.OtherSecret()))
        raise other_secret()
    proof = secret.proof(key, secret.AGENT, nonce, challenge.nonce)
    wire.wait_at_most(JOINED_S)
    said: messages.NodeReport | Failure
    if challenge.protocol == messages.PROTOCOL:
        said = report(config.node_addr or wire.own_host)
    else:
        versions = own_version(), challenge.version
        said = Failure.of(other_protocol(*versions, messages.PROTOCOL, challenge.protocol))
    if isinstance(said, Failure):
        name = platform.node()[:255]
        wire.send(messages.encode(messages.CannotJoin(proof, config.node_rank, name, said)))
    else:
        wire.send(messages.encode(messages.Join(proof, said)))
    answer = messages.decode_from_head(wire.receive(MOST_BEFORE_PROOF))
    if isinstance(answer, messages.Refused):
        raise answer.failure.error()
    if not isinstance(answer, messages.Welcome):
        raise OSError("the head says something else than expected")
