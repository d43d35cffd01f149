"""What a server and its Ray driver say to each other, how it is packed (msgspec's MessagePack), and how long the driver
waits for what before it says why not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.records import Failure

RELEASED_S = 15.0
"""For what a job before this one had to become free."""
RESERVED_S = 15.0
"""For a placement group that has room."""
HELLO_S = 60.0
"""For the processes of all agents, which start at the same time."""


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a driver, and the only one: after it the driver keeps what it reserved until this side hangs
    up."""

    name: str
    """Of the placement group, for people."""
    tensor_parallel: int
    pipeline_parallel: int
    kind: str
    threads: int | None
    memory_bytes: int | None
    nodes: int | None
    """Their number, where an engine has them already."""
    config: dict[str, object]
    """Of the agents, but for what is different on each node."""
    environment: dict[str, str]


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The cluster has let this job in."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All nodes are reserved, and each has an agent that looks for the head."""

    nodes: int
    address: str
    """Of the node where the server runs."""
    amount: int
    """CPUs or GPUs reserved on each."""
    names: list[str]
    """Of the nodes, in their order."""
    gpus: list[str] = []
    """That Ray has chosen where the server runs, as CUDA_VISIBLE_DEVICES would name them; on other nodes agents see
    theirs alone."""


class NotPlaced(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


class Note(msgspec.Struct, frozen=True, tag=True):
    """For the log."""

    level: str
    text: str


FromDriver = Connected | Placed | NotPlaced | Note

encode = msgspec.msgpack.Encoder().encode
decode_reserve: Callable[[bytes], Reserve] = msgspec.msgpack.Decoder(Reserve).decode
decode_from_driver: Callable[[bytes], FromDriver] = msgspec.msgpack.Decoder(FromDriver).decode
