"""The state of a server as lines of a terminal: what its page shows, in as many rows as there are.

Knows /ui/state, asks nobody. What a server or a file said is spelled out where it would steer a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from rich.text import Text

from holdfast.errors import printable
from holdfast.observability.ledger import Ledger, TierMemory, use_lines
from holdfast.server.ui.machine import MachineTier
from holdfast.server.ui.state import RequestState, UiState
from holdfast.units import format_bytes, format_duration, shorten

HELD, PLANNED, OTHERS, FREE = range(4)
BLOCKS, PLAIN = "█▒░·", "#=-."
HEIGHTS, PLAIN_HEIGHTS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
COLOURS = ("green", "cyan", "yellow", "bright_black")
STATUS = {"ready": "green", "sleeping": "blue", "dead": "red", "hung": "red", "unreachable": "red"}
LEVELS = {"error": "red", "warning": "yellow", "note": "blue"}
SHOWN_NOTICES = 5
SHOWN_ADAPTERS, SHOWN_DECISIONS = 8, 6
"""A terminal is no page: what runs, and what was decided last."""
COLUMN = 42
REQUEST_HEAD = (
    f"{'request':<42} {'state':<8} {'age':>10} {'prompt':>7} {'cached':>7} {'generated':>13} {'first':>9} {'tok/s':>7}"
)


@dataclass(frozen=True, slots=True)
class ServerLook:
    """What is known of one server at one moment."""

    url: str
    status: str
    reason: str
    """Why nothing more is known; empty: it is."""
    state: UiState | None = None
    memory: Ledger | None = None
    rates: tuple[float, float] | None = None
    """Tokens a second of prompts and generated ones since the look before."""

    @property
    def told(self) -> dict[str, Any]:
        """For programs: /ui/state, and what it was asked of."""
        known = {} if self.state is None else msgspec.to_builtins(self.state)
        return {"url": self.url, "status": self.status, "reason": self.reason or None} | known


def screen_lines(look: ServerLook, *, width: int, rows: int | None = None, blocks: bool = True) -> list[Text]:
    """`rows`: as many at most. `blocks`: whether the terminal has more than ASCII."""
    return list(islice(_lines(look, width, blocks), rows))


def _lines(look: ServerLook, width: int, blocks: bool) -> Iterator[Text]:
    state = look.state
    names = "" if state is None or state.model is None else ", ".join(map(printable, state.model.names))
    yield Text.assemble(
        ("● " if blocks else "* ", STATUS.get(look.status, "yellow")),
        (look.status, "bold"),
        f"  {names}  {printable(look.url)}" if names else f"  {printable(look.url)}",
        ""
        if state is None
        else f"  up {format_duration(state.server.uptime_s)}, holdfast {printable(state.server.version)}",
    )
    if look.reason:
        yield Text(f"  {printable(look.reason)}")
    if state is not None:
        yield from _numbers(look, state)
    if look.memory is not None:
        machine = [] if state is None else state.machine
        for tier in look.memory.tiers:
            yield from _tier(look.memory, tier, machine, width, blocks)
        planned = {tier.tier for tier in look.memory.tiers}
        for one in machine:
            if one.tier not in planned or not one.ours:
                yield from _unplanned(look.memory, one, width, blocks)
        yield _pages(look.memory, blocks)
        yield from (Text(shorten(f"  {line}", width - 3)) for line in use_lines(look.memory))
    if state is not None:
        yield from _hour(state, width, blocks)
        yield from _notices(state)
        yield from _requests(state, width)
        yield from _adapters(state, width)
    if look.memory is not None:
        yield from _decisions(look.memory, width)
    yield Text("")


def _numbers(look: ServerLook, state: UiState) -> Iterator[Text]:
    load, samples = state.load, _named(state)
    last = samples[-1] if samples else {}
    prompt, generated = look.rates or (last.get("prompt_tokens_per_s"), last.get("generation_tokens_per_s"))
    hits = "-" if load.prefix_hit_share is None else f"{load.prefix_hit_share:.0%}"
    yield _pairs(
        ("running", f"{load.running:,}"),
        ("waiting", f"{load.waiting:,}"),
        ("generated", f"{generated or 0:,.1f} tok/s"),
        ("prompts", f"{prompt or 0:,.1f} tok/s"),
        ("prefix hits", hits),
        ("preemptions", f"{load.preemptions_total:,}"),
    )
    recent = samples[-12:]
    figures = {name: _newest(recent, name) for name in ("ttft", "inter_token", "e2e")}
    titles = {"ttft": "first token", "inter_token": "between tokens", "e2e": "to the last token"}
    yield _pairs(*((titles[name], f"{low} (p95 {high})") for name, (low, high) in figures.items()))


def _pairs(*pairs: tuple[str, str]) -> Text:
    parts: list[str | tuple[str, str]] = ["  "]
    for name, value in pairs:
        parts += [(f"{name} ", "bright_black"), (value, "bold"), "   "]
    return Text.assemble(*parts)


def _named(state: UiState) -> list[dict[str, float | None]]:
    return [dict(zip(state.history.fields, sample, strict=False)) for sample in state.history.samples]


def _newest(samples: Sequence[dict[str, float | None]], name: str) -> tuple[str, str]:
    for sample in reversed(samples):
        low, high = sample.get(f"{name}_p50_s"), sample.get(f"{name}_p95_s")
        if low is not None and high is not None:
            return _short(low), _short(high)
    return "-", "-"


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else format_duration(seconds)


def _tier(memory: Ledger, tier: TierMemory, machine: Sequence[MachineTier], width: int, blocks: bool) -> Iterator[Text]:
    now = next((one for one in machine if one.tier == tier.tier and one.ours), None)
    total = tier.total_bytes if now is None else now.total_bytes
    held = tier.measured_bytes
    others = 0 if now is None else max(0, total - now.free_bytes - held)
    terms = [term for term in memory.terms if term.tier == tier.tier]
    name = tier.tier.upper() if now is None else printable(now.name)
    planned, budget = format_bytes(tier.planned_bytes), format_bytes(tier.budget_bytes)
    said = f"{format_bytes(held)} held, {planned} planned, budget {budget}"
    if now is not None:
        said += f"; others {format_bytes(others)}, free {format_bytes(now.free_bytes)} of {format_bytes(total)}"
    yield Text.assemble((f"  {name}  ", "bold"), said)
    yield _bar([held, max(0, tier.planned_bytes - held), others], total, width - 4, blocks)
    cells = [
        f"{term.term:<12} {format_bytes(term.planned_bytes):>12} {_measured(term.measured_bytes):>12}" for term in terms
    ]
    across = max(1, (width - 4) // COLUMN)
    head = f"{'':<12} {'planned':>12} {'measured':>12}"
    yield Text("    " + "   ".join([head] * min(across, len(cells))), "bright_black")
    for place in range(0, len(cells), across):
        yield Text("    " + "   ".join(cells[place : place + across]))
    yield from [] if now is None else _holders(now, width)


def _unplanned(memory: Ledger, tier: MachineTier, width: int, blocks: bool) -> Iterator[Text]:
    """What else the machine has: RAM beside a GPU, GPUs that the engine is not on."""
    held = sum(process.resident_bytes for process in memory.processes) if tier.tier == "ram" else 0
    others = max(0, tier.total_bytes - tier.free_bytes - held)
    said = f"{format_bytes(held)} held; others {format_bytes(others)}, free {format_bytes(tier.free_bytes)}"
    yield Text.assemble((f"  {printable(tier.name)}  ", "bold"), f"{said} of {format_bytes(tier.total_bytes)}")
    yield _bar([held, 0, others], tier.total_bytes, width - 4, blocks)
    yield from _holders(tier, width)


def _holders(tier: MachineTier, width: int) -> Iterator[Text]:
    if tier.holders:
        shown = (f"{printable(one.name)} (pid {one.pid}) {_measured(one.held_bytes)}" for one in tier.holders)
        yield Text(shorten("    others: " + ", ".join(shown), width), "bright_black")


def _measured(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _bar(parts: Sequence[float], total: float, width: int, blocks: bool) -> Text:
    """`parts` in the order of the glyphs; what is left is free. What is there at all has one character."""
    glyphs, bar, left = BLOCKS if blocks else PLAIN, Text("    "), max(10, width)
    most = left
    for place, part in enumerate(parts):
        length = min(left, max(1 if part > 0 else 0, round(most * part / max(1, total))))
        bar.append(glyphs[place] * length, COLOURS[place])
        left -= length
    return bar.append(glyphs[FREE] * left, COLOURS[FREE])


def _pages(memory: Ledger, blocks: bool) -> Text:
    kv = memory.kv
    idle = max(0, kv.blocks_touched - kv.blocks_used)
    bar = _bar([kv.blocks_used, idle], kv.blocks, 30, blocks)
    said = f" {kv.blocks_used:,} in use, {idle:,} idle, of {kv.blocks:,} pages of {format_bytes(kv.page_bytes)}"
    return Text.assemble(("  KV", "bold"), bar, said) if kv.blocks else Text("  KV  none")


def _hour(state: UiState, width: int, blocks: bool) -> Iterator[Text]:
    """The highest of each stretch of the hour, in one row."""
    samples, columns = _named(state), max(10, min(60, width - 40))
    heights = HEIGHTS if blocks else PLAIN_HEIGHTS
    for title, field in (("tokens/s", "generation_tokens_per_s"), ("running", "running"), ("waiting", "waiting")):
        values = [sample.get(field) or 0.0 for sample in samples]
        step = max(1, -(-len(values) // columns))
        highest = [max(values[place : place + step]) for place in range(0, len(values), step)]
        top = max(highest, default=0.0)
        drawn = "".join(heights[round((len(heights) - 1) * value / top) if top else 0] for value in highest)
        span_s, digits = len(values) * state.history.interval_s, 1 if field.endswith("per_s") else 0
        yield Text.assemble(
            (f"  {title:<9}", "bright_black"),
            (drawn, "green"),
            f"  up to {top:,.{digits}f} within {format_duration(span_s)}",
        )


def _notices(state: UiState) -> Iterator[Text]:
    for notice in state.notices[:SHOWN_NOTICES]:
        colour = LEVELS.get(notice.level, "yellow")
        yield Text.assemble((f"  {printable(notice.level)}: ", colour), printable(notice.text))
        if notice.fix:
            yield Text(f"    fix: {printable(notice.fix)}")
    if len(state.notices) > SHOWN_NOTICES:
        yield Text(f"  and {len(state.notices) - SHOWN_NOTICES} more: --json has them", "bright_black")


def _adapters(state: UiState, width: int) -> Iterator[Text]:
    """Those that run or wait first: there may be hundreds."""
    found = sorted(state.adapters, key=lambda one: (not one.running, not one.waiting))
    if not found:
        return
    yield Text(f"  LoRA adapters: {len(found):,}", "bright_black")
    for one in found[:SHOWN_ADAPTERS]:
        now = "running" if one.running else "waiting" if one.waiting else "idle"
        base = f", of {printable(one.base)}" if one.base else ""
        yield Text(shorten(f"    {printable(one.name)}  {now}{base}", width))
    if len(found) > SHOWN_ADAPTERS:
        yield Text(f"    and {len(found) - SHOWN_ADAPTERS} more: --json has them", "bright_black")


def _decisions(memory: Ledger, width: int) -> Iterator[Text]:
    """What was decided by itself, the newest last as on the page; the whole of it is in `ps -v`."""
    if not memory.decisions:
        return
    left = len(memory.decisions) - SHOWN_DECISIONS
    yield Text(f"  decisions: {len(memory.decisions):,}", "bright_black")
    if left > 0:
        yield Text(f"    {left} before these: holdfast ps -v has them", "bright_black")
    for line in memory.decisions[-SHOWN_DECISIONS:]:
        yield Text(shorten(f"    {printable(line)}", width))


def _requests(state: UiState, width: int) -> Iterator[Text]:
    found = state.requests
    if not found.open:
        return
    yield Text(f"  {REQUEST_HEAD}"[:width], "bright_black")
    for request in found.shown:
        yield Text(f"  {_request(request)}"[:width])
    if len(found.shown) < found.open:
        yield Text(f"  the oldest {len(found.shown)} of {found.open:,}", "bright_black")


def _request(request: RequestState) -> str:
    first = "-" if request.ttft_s is None else _short(request.ttft_s)
    speed = "-" if request.tokens_per_s is None else f"{request.tokens_per_s:,.1f}"
    generated = f"{request.generated_tokens:,}/{request.max_tokens:,}"
    return (
        f"{printable(shorten(request.id, 40)):<42} {printable(request.state):<8} {format_duration(request.age_s):>10} "
        f"{request.prompt_tokens:>7,} {request.cached_tokens:>7,} {generated:>13} {first:>9} {speed:>7}"
    )
