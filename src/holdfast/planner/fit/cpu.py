"""What a model costs this engine on a CPU: the very count that `serve` makes, asked for a machine that may be another.

    settings ─► the config that serve would have ─► CpuChoices ─► terms, pool and context

Only for models that this engine runs; `fit` counts the others in general terms. Refuses nothing: says what is short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from holdfast.checkpoints import LAYOUTS, StoredTensor
from holdfast.config import EngineConfig
from holdfast.footprint.cpu import BOOK_BYTES, ELEMENT_BYTES, FRONT_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.hardware import Processor
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import Machine, PlannedModel, Settings, Traffic
from holdfast.planner.serve.cpu_plan import pool_decision
from holdfast.planner.sizing import default_limits
from holdfast.planner.sizing.cpu_budget import DEFAULT_KV_BYTES, LEAST_TOKENS, CpuBudget
from holdfast.planner.sizing.cpu_choices import CpuChoices
from holdfast.planner.sizing.kv_cost import KVCost, layout_cost
from holdfast.planner.sizing.terms import Term

_STORED_AS: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNCERTAINTY: Mapping[str, float] = {"front": 0.25, "framework": 0.25, "libraries": 0.4, "activations": 0.25}
"""Of what is measured or estimated; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFit:
    rung: int
    """Of the limits that were not set: 0 has the defaults."""
    room: CpuBudget
    length: int
    """The context that would be served; where nothing fits, the shortest that would do."""
    blocks: int
    """Of the traffic's sequences side by side; 0: there is none."""
    longest_tokens: int
    """The longest context that memory holds, whatever was asked for, with the lowest limits that are not set."""
    short_bytes: int
    """0: it fits."""
    flags: Mapping[str, object]
    """Settings that serve needs so as to do this, beside those that were asked for."""
    decisions: tuple[Decision, ...]

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0

    @property
    def pages(self) -> int:
        """Of the pool that would be there, or of the least that would do."""
        return self.room.pool(self.length).blocks if self.fits else self.room.pages(self.length, self.blocks)

    @property
    def held_pages(self) -> int:
        """Without the null page, of the pool beside the longest context that fits; 0: none does."""
        return max(0, self.room.pool(self.longest_tokens).blocks - 1) if self.longest_tokens else 0

    @property
    def terms(self) -> tuple[Term, ...]:
        """All but the pool; the books of its blocks are among the buffers."""
        counted = self.room.terms(self.length)
        counted["buffers"] += self.pages * BOOK_BYTES
        return tuple(Term(name, size, _UNCERTAINTY.get(name, 0.0)) for name, size in counted.items())

    @property
    def loading(self) -> tuple[Term, ...]:
        return tuple(Term(name, size, _UNCERTAINTY.get(name, 0.0)) for name, size in self.room.loading_terms.items())

    @property
    def kv(self) -> KVCost:
        return layout_cost(self.room.layout, self.room.config.step_tokens)


def runs_here(model: PlannedModel, settings: Settings) -> bool:
    """Whether `serve` would take it: what it cannot read or keep has no count of its own."""
    spec = model.spec
    known = model.canonical is not None or model.stored is None or model.derived
    kept = settings.kv_cache_dtype == "auto" or settings.kv_cache_dtype in ELEMENT_BYTES
    return spec.runnable and spec.quantization is None and known and kept


def least_tokens(model: PlannedModel, settings: Settings) -> int:
    """The shortest context that is an answer."""
    return settings.max_model_len or min(LEAST_TOKENS, model.spec.max_position)


def host(
    model: PlannedModel,
    machine: Machine,
    settings: Settings,
    *,
    budget_bytes: int,
    traffic: Traffic | None = None,
) -> CpuFit:
    """Traffic has the pool that it needs, and a context that leaves room for it."""
    config = EngineConfig(
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs or (traffic.concurrency if traffic is not None else None),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        ram=None if machine.devices[0].budget_bytes is None else budget_bytes,
        block_size=settings.block_tokens,
        expand_weights=settings.expand_weights,
        enable_lora=settings.max_loras > 0,
        max_loras=settings.max_loras or None,
        max_lora_rank=settings.max_lora_rank if settings.max_loras else None,
    )
    measure = CpuChoices(
        spec=model.spec,
        stored=_stored(model),
        config=config,
        processor=Processor(model="", cores=1, features=machine.cpu_features),
        compiled_kernels=machine.compiled_kernels,
        budget_bytes=budget_bytes,
        front_bytes=FRONT_BYTES,
    )
    found = _alone(measure) if traffic is None else _beside(measure, traffic)
    default = ("the default", "default") if traffic is None else ("the traffic's peak", "traffic")
    said = default_limits.decisions(
        measure.rungs,
        found.rung,
        sequences=default if settings.max_num_seqs is None else None,
        step_is_set=settings.max_num_batched_tokens is not None,
        fits=found.fits,
        beside=default_limits.context_said(found.length) if traffic is None else "the traffic",
    )
    return replace(found, decisions=(*said, *found.decisions))


def _alone(measure: CpuChoices) -> CpuFit:
    """As serve does it."""
    rung, room, chosen = measure.chosen()
    length = room.longest(room.most, least=room.least)
    return _hosted(rung, room, chosen, length=length, least=room.least, longest=measure.longest_tokens())


def _beside(measure: CpuChoices, traffic: Traffic) -> CpuFit:
    """With the first limits that leave room for the traffic; weights stay in blocks before limits are lowered."""
    longest = measure.longest_tokens()
    for rung in range(len(measure.rungs)):
        found = _with_traffic(measure, rung, traffic, longest)
        if not found.fits and found.room.choices.expand_weights:
            in_blocks = replace(measure, config=replace(measure.config, expand_weights="never"))
            found = _with_traffic(in_blocks, rung, traffic, longest)
            found = replace(found, flags={**found.flags, "expand_weights": "never"})
        if found.fits:
            break
    return found


def _with_traffic(measure: CpuChoices, rung: int, traffic: Traffic, longest: int) -> CpuFit:
    """Where limits were lowered for it, the context is no longer than the traffic's: with the next higher ones, which
    take more memory, it may be no longer either."""
    room, chosen = measure.room(measure.rungs[rung])
    config = room.config
    blocks = room.layout.blocks_side_by_side(traffic.concurrency, traffic.length, config.step_tokens)
    least = config.max_model_len or min(room.spec.max_position, traffic.length)
    room, flags = _with_pool(room, traffic, blocks)
    length = room.longest(least if rung else room.most, least=least, blocks=blocks)
    found = _hosted(rung, room, chosen, length=length, least=least, longest=longest, blocks=blocks)
    return replace(found, flags=flags)


def _hosted(
    rung: int, room: CpuBudget, chosen: Sequence[Decision], *, length: int, least: int, longest: int, blocks: int = 0
) -> CpuFit:
    """`length` 0: nothing fits."""
    pool = [pool_decision(room.pool(length), room.layout.page_bytes)] if length else []
    return CpuFit(
        rung=rung,
        room=room,
        length=length or least,
        blocks=blocks,
        longest_tokens=longest,
        short_bytes=0 if length else max(1, room.short_bytes(least, blocks)),
        flags={},
        decisions=(*chosen, *pool),
    )


def _with_pool(room: CpuBudget, traffic: Traffic, blocks: int) -> tuple[CpuBudget, dict[str, object]]:
    """With the pool's size set where serve would otherwise take a smaller one than this traffic needs."""
    page, config = room.layout.page_bytes, room.config
    by_default = config.ram is None and (1 + blocks) * page > DEFAULT_KV_BYTES
    if not by_default and traffic.concurrency <= config.sequences:
        return room, {}
    needed = (1 + blocks) * page
    return replace(room, config=replace(config, kv_cache_memory_bytes=needed)), {"kv_cache_memory_bytes": needed}


def _stored(model: PlannedModel) -> Mapping[str, StoredTensor] | None:
    """As the file is, or will be when it is fetched. None: a config without weights, which only dummies fill, and those
    are made in the dtype that is computed in."""
    if model.canonical is not None:
        return model.canonical
    if model.stored is not None:
        return model.stored
    return _published(Same(model.spec)) if model.origin in ("catalogue", "builtin") else None


@lru_cache(maxsize=16)
def _published(key: Same[ModelSpec]) -> Mapping[str, StoredTensor]:
    """Plain weights in the dtype that the model is published in."""
    layout = _STORED_AS[key.held.stored_dtype]
    return {
        tensor.name: StoredTensor(
            tensor.name, tensor.shape, layout, Path(), 0, LAYOUTS[layout].bytes_for(tensor.shape) or 0
        )
        for tensor in key.held.tensors
        if not tensor.optional
    }
