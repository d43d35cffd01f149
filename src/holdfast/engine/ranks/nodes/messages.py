"""What the head and the agents of other nodes say to each other, and how it is packed (msgspec's MessagePack).

agent   NodeHello            ──►            head
        ◄──  Challenge, with the proof that it has the secret
        Join, with the agent's proof and what its node has; or CannotJoin, and why
        ◄──  Welcome, or Refused
        ◄──  StartNode, TellRank, then mail for the ranks of the node (the first byte is MAIL); at last EndNode
        NodeStarted, then what ranks say, how they end, and signs of life with their counts

Both sides know each other's protocol after the first two messages. What is said where it is another (NodeHello,
Challenge, OtherSecret, CannotJoin, Refused) is read by all versions: it gets new fields with defaults, and loses none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.engine.ranks.messages import StartRank
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.records import Failure

PROTOCOL = 3
MAIL, MESSAGE = b"\x00", b"\x01"
NONCE_BYTES = 32


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    protocol: int = PROTOCOL
    version: str = ""
    """Of Holdfast, for people."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    proof: bytes
    protocol: int = 1
    version: str = ""


class OtherSecret(msgspec.Struct, frozen=True, tag=True):
    """Of an agent: the head has another secret."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has, and what must be the same on all."""

    node: int
    nodes: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    version: str
    sources: str = ""
    """A digest of Holdfast's own files: two installations of one version may differ."""
    checkpoint: dict[str, str]
    """By file: its size and a digest of its header; of a config a digest of it."""
    host: str
    """Where other nodes reach its ranks."""
    name: str
    """Of the machine, for people."""
    agent: str = ""
    """Of the process, and of no other anywhere: by it one that joins again is told from a second one."""
    pid: int
    cores: int
    total_bytes: int
    free_bytes: int
    """Of RAM."""
    kernels: bool
    """It has compiled ones."""
    gpus: list[NvidiaGpu] = []
    """Of its ranks, in their order; none: they compute on its CPU."""


class Join(msgspec.Struct, frozen=True, tag=True):
    proof: bytes
    report: NodeReport


class CannotJoin(msgspec.Struct, frozen=True, tag=True):
    """Of a node that has no model, say: the head need not wait for it."""

    proof: bytes
    node: int
    name: str
    failure: Failure


class Welcome(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


class StartNode(msgspec.Struct, frozen=True, tag=True):
    ranks: list[StartRank]


class TellRank(msgspec.Struct, frozen=True, tag=True):
    """To a rank of the node by its socket, while it starts."""

    rank: int
    message: bytes


class EndNode(msgspec.Struct, frozen=True, tag=True):
    """Its ranks are ended."""

    again: bool
    """And others are started soon: the node joins anew."""
    failure: Failure | None = None
    """Why this engine has not started."""


class NodeStarted(msgspec.Struct, frozen=True, tag=True):
    pids: dict[int, int]
    """By rank."""


class RankSaid(msgspec.Struct, frozen=True, tag=True):
    rank: int
    message: bytes


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    rank: int
    ending: str


class Sign(msgspec.Struct, frozen=True, tag=True):
    """Of life; with the counts of the node's ranks."""

    counts: list[int]
    sent: list[int]
    alive: list[int]
    stopped: list[int] = []
    """Ranks whose process is stopped."""


BeforeProof = NodeHello | Challenge | OtherSecret
FromAgent = OtherSecret | Join | CannotJoin | NodeStarted | RankSaid | RankEnded | Sign
FromHead = Challenge | Welcome | Refused | StartNode | TellRank | EndNode

encode = msgspec.msgpack.Encoder().encode
decode_hello: Callable[[bytes], NodeHello] = msgspec.msgpack.Decoder(NodeHello).decode
decode_from_agent: Callable[[bytes], FromAgent] = msgspec.msgpack.Decoder(FromAgent).decode
decode_from_head: Callable[[bytes], FromHead] = msgspec.msgpack.Decoder(FromHead).decode
