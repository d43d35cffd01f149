"""What rank 0 and the other ranks say to each other, and how it is packed (msgspec's MessagePack).

by a socket of each rank    StartRank, and all that ranks answer
by the mailbox, to all      plans (the first byte is STEP), orders that are followed in turn with them (ORDER), and of a
                            pipeline the tokens that a step before has sampled (SAMPLED)
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.planner import Plan
from holdfast.records import AdapterArrival, Failure, StepPlan

STEP, ORDER, SAMPLED = b"\x00", b"\x01", b"\x02"


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The first message to a new rank: its number, and what the engine was started with."""

    rank: int
    size: int
    config: dict[str, object]
    plan: Plan
    threads: int
    store_port: int | None = None
    """Where ranks find one another that do not share memory; None: all do."""
    store_host: str = "127.0.0.1"
    host: str = "127.0.0.1"
    """Where others reach this rank."""
    key: bytes = b""
    """By which ranks of this start know one another."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a step, by slot, for ranks that look embeddings up."""

    slots: list[int]
    tokens: list[int]


class ProfileStep(msgspec.Struct, frozen=True, tag=True):
    """Run the heaviest step, with all other ranks."""


class FindScales(msgspec.Struct, frozen=True, tag=True):
    """Of a KV cache in FP8, with all other ranks."""


class BackKV(msgspec.Struct, frozen=True, tag=True):
    """Allocate the pool anew."""

    blocks: int
    most_blocks: int | None = None


class ResizePool(msgspec.Struct, frozen=True, tag=True):
    blocks: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """All is ready. Of GPUs: another rank may let this one wait for so long; 0: for ever."""

    limit_s: float


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End, in order."""


class RankOpened(msgspec.Struct, frozen=True, tag=True):
    """Its GPU is open. By this handle others map its memory; empty: they cannot, and why."""

    handle: bytes
    against: str = ""


class JoinRanks(msgspec.Struct, frozen=True, tag=True):
    """To each rank on a GPU: the handles of all; none, and why."""

    handles: list[bytes]
    against: str = ""


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """It has mapped the memory of all others; or why not."""

    against: str = ""


class RankHere(msgspec.Struct, frozen=True, tag=True):
    """It has begun, and looks for those that it shares no memory with."""


class RankLoading(msgspec.Struct, frozen=True, tag=True):
    done: int
    total: int


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    weights_bytes: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Of one rank after the profile run, by term; and what no term has, and what is not held between steps."""

    terms: dict[str, int]
    nameless_bytes: int
    given_back_bytes: int
    peak_bytes: int
    """While it loaded."""
    free_bytes: int = 0
    """On its GPU; of a CPU in the RAM of its machine."""
    own_bytes: int = 0
    """That it holds there, by the driver's count."""
    kv_bytes: int = 0
    """Of that, of KV pages so far."""


class ScalesFound(msgspec.Struct, frozen=True, tag=True):
    """Of a KV cache in FP8, those of the layers that this rank has."""

    keys: list[float]
    values: list[float]


class Done(msgspec.Struct, frozen=True, tag=True):
    """An order has been followed."""


class AdapterSettled(msgspec.Struct, frozen=True, tag=True):
    """A LoRA adapter is in its place on this rank, or why not."""

    asked_in: int
    """The step whose plan asked for it: another may have asked for the place since."""
    arrival: AdapterArrival


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last word of a rank that ends: why."""

    failure: Failure


Order = ProfileStep | FindScales | BackKV | ResizePool | Serve | Leave
FromRank = (
    RankHere
    | RankOpened
    | RankJoined
    | RankLoading
    | RankLoaded
    | Measured
    | ScalesFound
    | Done
    | AdapterSettled
    | RankFailed
)

encode = msgspec.msgpack.Encoder().encode
decode_start: Callable[[bytes], StartRank] = msgspec.msgpack.Decoder(StartRank).decode
decode_join: Callable[[bytes], JoinRanks] = msgspec.msgpack.Decoder(JoinRanks).decode
decode_plan: Callable[[bytes], StepPlan] = msgspec.msgpack.Decoder(StepPlan).decode
decode_sampled: Callable[[bytes], Sampled] = msgspec.msgpack.Decoder(Sampled).decode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_from_rank: Callable[[bytes], FromRank] = msgspec.msgpack.Decoder(FromRank).decode
