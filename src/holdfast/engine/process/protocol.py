"""What the front and the engine process say to each other, and how it is packed (msgspec's MessagePack)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast import errors
from holdfast.planner import Plan
from holdfast.records import (
    EngineInfo,
    EngineOutput,
    EngineStats,
    Failure,
    PoolChange,
    Request,
    SleepingKV,
    VramBudget,
    VramGrant,
)


class Init(msgspec.Struct, frozen=True, tag=True):
    """The first message to a new process: its settings, as `EngineConfig` fields, and what the front planned."""

    config: dict[str, object]
    plan: Plan | None = None
    grammar_address: str | None = None
    """Where grammar workers are to be had; None: there is no structured output."""
    kept: SleepingKV | None = None
    """By a process before this one that was put to sleep."""
    engine: int | None = None
    """Its number, where the front has several engines."""
    debug: bool = False
    """The front's log has such lines."""
    again: bool = False
    """A process before this one has served: whoever was part of that engine is needed for this one, and for the next
    where this one does not start."""


class Add(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    pass


class ResizeKV(msgspec.Struct, frozen=True, tag=True):
    """The KV pool shall have so many pages, the null page included."""

    blocks: int
    number: int
    """Which the answer has too."""


class SetVram(msgspec.Struct, frozen=True, tag=True):
    asked: VramBudget
    number: int


class KeepKV(msgspec.Struct, frozen=True, tag=True):
    """What is cached of prompts shall outlive the process, which is told to stop next."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Loading(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: EngineStats = EngineStats()
    """Links and tiers are told before a first step."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    failure: Failure


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """The last word of a process that ends: why."""

    failure: Failure


class Resized(msgspec.Struct, frozen=True, tag=True):
    """To a ResizeKV or a SetVram: it is as asked, or nothing has changed."""

    number: int
    failure: Failure | None = None
    granted: VramGrant | None = None
    """To a SetVram."""
    stood_still_s: float = 0.0
    """How long no step ran for it."""


class Balanced(msgspec.Struct, frozen=True, tag=True):
    """Layers on the GPU and pages of the KV pool have changed places by themselves."""

    granted: VramGrant


class Kept(msgspec.Struct, frozen=True, tag=True):
    """To a KeepKV."""

    kept: SleepingKV | None


class Breathed(msgspec.Struct, frozen=True, tag=True):
    """The KV pool has given memory up, or taken it again, by itself."""

    change: PoolChange


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The loop goes round: each second at least, also while there is nothing to do or a step is long."""


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[EngineOutput]
    stats: EngineStats


ToEngine = Init | Add | Abort | ResetPrefixCache | ResizeKV | SetVram | KeepKV | Stop
FromEngine = Loading | Ready | StartFailed | StepFailed | Resized | Balanced | Breathed | Kept | Beat | StepOutputs

encode = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


def pack_failure(error: Exception) -> Failure:
    if isinstance(error, errors.HoldfastError):
        return Failure.of(error)
    return Failure(kind="EngineError", message=f"{type(error).__name__}: {error}", code=errors.EngineError.code)
