"""Tiers below the KV cache as settings to choose: RAM beside a GPU, and a folder on a disk. How large each may be, what
it is of use for under a traffic, and why it is not looked at. Starts nothing.

    KV that the traffic asks for:  those that run at once  +  what prompts have in common
    pool ────────────────────────┐
    RAM  ──────────── of use for what the pool does not hold, and no more
    disk ──────────── of use for what prompts have in common, where pool and RAM do not hold it
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.bench.load.load import Arrival
from holdfast.planner.fit.placement import pinned_room
from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.host_ram import usual_kv_ram
from holdfast.tune.configuration import Axis, LeftOut, ServerConfiguration
from holdfast.units import GIB, parse_bytes

OWN_RAM, VLLM_RAM, STORE = "kv_ram", "kv_offloading_size", "kv_store"


class CommonPrefixes(msgspec.Struct, frozen=True):
    """What prompts begin with in common, as the user says it: a log tells lengths only."""

    tokens: int = 0
    share: float = 1.0
    """Of prompts that begin with one of them."""
    count: int = 1

    @property
    def kv_tokens(self) -> int:
        return self.tokens * self.count


def kv_tier_axes(default: Plan, *, own: bool, store: str | None) -> tuple[list[Axis], list[LeftOut]]:
    """`store`: a folder for pages on a disk."""
    found, left_out = _of_ram(default, own=own)
    if store is not None:
        return [*found, Axis(STORE, (None, store))], left_out
    if own:
        left_out.append(LeftOut((STORE,), "no folder was given (--kv-store DIR)"))
    return found, left_out


def _of_ram(default: Plan, *, own: bool) -> tuple[list[Axis], list[LeftOut]]:
    name = OWN_RAM if own else VLLM_RAM
    if default.question.machine.kind != "gpu":
        return [], [LeftOut((name,), "on a CPU the KV cache is in RAM already")]
    room = pinned_room(default.question)
    taken = room is None or default.question.settings.offloads  # By layers or experts, which the server counts itself.
    usual, most = usual_bytes(default), 0 if room is None or taken else room // GIB
    if own:
        more = [f"{most}GiB"] if most * GIB > 1.25 * usual else []
        return ([Axis(name, ("0", None, *more) if usual else (None, *more))] if usual or more else []), []
    sizes = sorted({size for size in (most // 4, most) if size >= 1})
    return ([Axis(name, (None, *sizes))] if sizes else []), []


def usual_bytes(plan: Plan) -> int:
    """Of RAM that a server of ours takes by itself, for each engine."""
    room = pinned_room(plan.question)
    if plan.question.machine.kind != "gpu" or room is None or not plan.fits:
        return 0
    return usual_kv_ram(room // plan.question.settings.data_parallel, plan.ranks[0].pool_bytes)


def ram_bytes(plan: Plan, configuration: ServerConfiguration, *, own: bool) -> int:
    """For KV that leaves the GPU: of each engine of ours, or of all of vLLM's."""
    asked = configuration.value(OWN_RAM if own else VLLM_RAM)
    if asked is None:
        return usual_bytes(plan) if own else 0
    return parse_bytes(str(asked), field=OWN_RAM) if own else int(asked) * GIB


def too_much_ram(plan: Plan, configuration: ServerConfiguration, *, own: bool) -> bool:
    room = pinned_room(plan.question) if plan.question.machine.kind == "gpu" else None
    engines = plan.question.settings.data_parallel if own else 1
    return room is not None and ram_bytes(plan, configuration, own=own) * engines > room


def beyond_pool(plan: Plan, arrivals: Sequence[Arrival], prefixes: CommonPrefixes) -> int:
    """Tokens of KV that this traffic asks for at once, and the pool does not hold."""
    return max(0, running_tokens(plan, arrivals) + prefixes.kv_tokens - plan.kv_tokens)


def running_tokens(plan: Plan, arrivals: Sequence[Arrival]) -> int:
    """Of the longest requests that may run at once, in whole blocks and one more each."""
    block = plan.question.settings.block_tokens
    lengths = sorted((one.prompt_tokens + one.output_tokens for one in arrivals), reverse=True)
    running = lengths[: plan.limits.max_num_seqs]
    return sum(-(-length // block) * block for length in running) + block * len(running)


def of_use(
    plan: Plan, configuration: ServerConfiguration, arrivals: Sequence[Arrival], prefixes: CommonPrefixes, *, own: bool
) -> int:
    """Tokens of RAM's that could ever be asked for."""
    per_token = max(1, plan.kv_bytes_per_token)
    return min(ram_bytes(plan, configuration, own=own) // per_token, beyond_pool(plan, arrivals, prefixes))


def why_no_store(plan: Plan, arrivals: Sequence[Arrival], prefixes: CommonPrefixes, ram_tokens: int) -> str | None:
    """Why pages on a disk cannot help; None: they may."""
    if not prefixes.kv_tokens:
        return "the prompts that are replayed have nothing in common (--prefix-tokens)"
    if beyond_pool(plan, arrivals, prefixes) <= ram_tokens:
        return "the KV cache holds all that prompts have in common"
    return None
