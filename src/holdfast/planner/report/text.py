"""An answer as lines for people: bars of what lies where, then what was decided, what to beware of, what else there is.

Draws what answer.py found and works out nothing. Good without colour; no line is wider than asked, commands are broken
so that they can still be pasted.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from holdfast.engine_profiles.profile import profile
from holdfast.planner.advice.presets import Configuration
from holdfast.planner.advice.throughput import Estimate, throughput
from holdfast.planner.engines.command import Command
from holdfast.planner.fit.search import Rank, describe_devices
from holdfast.planner.models.model_sources import without_weights
from holdfast.planner.report.findings import PlanFindings
from holdfast.planner.report.offload import offload_lines
from holdfast.planner.report.ranks import rank_lines
from holdfast.planner.report.wrapping import LEAST_WIDTH, Paint, rounded_down, wrapped
from holdfast.planner.serve.shares.nodes import node_shares, shortest_node
from holdfast.planner.sizing.terms import Term
from holdfast.units import counted, format_bytes

SEGMENTS = (
    ("weights", "█", "34"),
    ("overhead", "▓", "35"),
    ("KV", "▒", "32"),
    ("free", "░", "36"),
    ("reserve", "·", "90"),
)
"""What a bar is made of, its mark and its colour. Overhead is everything that is neither weights nor KV."""
SHORT_MARK, SHORT_COLOUR = "!", "31"
LABEL_WIDTH = 13
SHOWN_NODES = 4
"""Commands of more differ in their number alone."""


def lines(
    answer: PlanFindings, width: int = 80, colour: bool = False, *, brief: bool = False, verbose: bool = False
) -> list[str]:
    """`brief`: what fits, the best way out, and the command of an engine that was asked for. `verbose`: rules of thumb
    too."""
    width, paint = max(LEAST_WIDTH, width), Paint(colour)
    parts = [
        list(_headline(answer, width, paint)),
        [] if brief else list(_devices(answer, width, paint)),
        list(_capacity(answer, width, brief)),
        _titled(
            "" if answer.offload is None else answer.offload.title, () if brief else _offload(answer, width), paint
        ),
        _titled("Ranks", () if brief else rank_lines(answer.fit), paint),
        _titled("Decisions", () if brief else _decisions(answer, width), paint),
        _titled("Warnings", () if brief else _warnings(answer, width, paint), paint),
        _titled(_ways_title(answer, brief), _ways(answer, width, brief), paint),
        list(_not_yet(answer, width)) if brief and answer.engine is None else [],
        _titled("Configurations", () if brief else _configurations(answer, width), paint),
        _titled(_commands_title(answer), () if brief and answer.engine is None else _commands(answer, width), paint),
        _titled("Rules of thumb and exact figures", _thumbs(answer, width) if verbose else (), paint),
    ]
    found: list[str] = []
    for part in parts:
        if part:
            found += [*([""] if found else []), *part]
    return found


def _titled(title: str, body: Iterable[str], paint: Paint) -> list[str]:
    found = list(body)
    return [paint.title(title), *found] if found else []


# Bars


def _headline(answer: PlanFindings, width: int, paint: Paint) -> Iterator[str]:
    found, model = answer.fit, answer.question.model
    nodes = answer.question.settings.nodes
    of_one = found.ranks[: max(1, len(found.ranks) // nodes)]
    where = describe_devices([rank.device for rank in of_one])
    where = f"{nodes} nodes, each with {where}" if nodes > 1 else where
    if answer.lacks:
        verdict, code = f"fits, but {_lacking(answer)}", "1;33"
    elif answer.fits and answer.from_disk is not None:
        verdict, code = f"runs with {answer.from_disk}", "1;33"
    elif answer.fits:
        verdict, code = "fits", "1;32"
        if answer.offload is not None:  # As it was placed by hand.
            verdict, code = f"fits; {answer.offload.verdict}", "1;33"
    elif answer.problem is not None:
        verdict, code = f"does not fit: {answer.problem}", "1;31"
    else:
        loading = any(found.lacks_for_loading(rank) for rank in node_shares(found))
        when = f" on node {shortest_node(found)[0]}" if nodes > 1 and found.own is not None else ""
        when += " while loading" if loading else ""
        verdict, code = f"does not fit: {format_bytes(found.short_bytes)} short{when}", "1;31"
        if answer.partly is not None:
            verdict, code = f"{verdict}; {answer.partly.verdict}", "1;33" if answer.runs else "1;31"
        if answer.refused is not None:
            verdict = f"{verdict}; {_named(answer, answer.refused)}"
        if answer.offload is not None:
            verdict, code = f"{verdict}; {answer.offload.verdict}", "1;33" if answer.runs else "1;31"
        if answer.disk_would_do is not None:
            verdict = f"{verdict}; {answer.disk_would_do}"
    text = f"{model.name} on {where}: "
    head = textwrap.wrap(text + verdict, width, break_on_hyphens=False)
    yield from head[:-1]
    yield head[-1].replace(verdict, paint(verdict, code))


def _lacking(answer: PlanFindings) -> str:
    return _named(answer, answer.lacks[0])


def _named(answer: PlanFindings, why: str) -> str:
    name = profile(answer.engine or "holdfast").name
    return why if why.startswith(name) else f"not for {name}: {why}"


def _offload(answer: PlanFindings, width: int) -> Iterator[str]:
    if answer.offload is None:
        return
    yield from offload_lines(answer.offload, width)
    if not answer.fits and answer.offload.may_run and not answer.offload.command.lacks:
        yield from command_lines(answer.offload.command, width)


def _devices(answer: PlanFindings, width: int, paint: Paint) -> Iterator[str]:
    """Ranks that look alike are drawn once."""
    groups, look = list[list[Rank]](), attrgetter("device.name", "budget_bytes", "terms", "stage")
    for rank in node_shares(answer.fit):
        if groups and look(groups[-1][0]) == look(rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    for number, group in enumerate(groups):
        if number:
            yield ""
        yield from _rank(answer, group, width, paint)
    idle = len(answer.question.machine.all_devices) - len(answer.fit.ranks)
    if idle > 0:
        more = f"; {answer.replicas} servers like this fit here, as replicas" if answer.replicas > 1 else ""
        yield from wrapped(f"{counted(idle, 'more device')} not used{more}", width, "", "  ")
    if answer.question.machine.ram_bytes is not None and answer.question.machine.kind == "gpu" and not answer.offload:
        kept = [f"{one.value} of it for KV blocks" for one in answer.decisions if one.field == "kv_ram"]
        use = kept[0] if kept else "not used by this plan"
        if answer.partly is not None and answer.partly.may_run:
            use = f"{format_bytes(answer.partly.ram_bytes)} of it for the layers that the CPU computes"
        yield f"RAM: {format_bytes(answer.question.machine.ram_bytes)} free, {use}"
    if answer.unused_disk_bytes is not None:
        yield f"NVMe: {format_bytes(answer.unused_disk_bytes)}, not used by this plan"


def sizes(answer: PlanFindings, rank: Rank) -> dict[str, int]:
    """Bytes of a bar's parts; they sum to the device's total where everything fits. Of a rank that lacks most while the
    model is loaded, what it holds then: KV comes afterwards."""
    loading = answer.fit.lacks_for_loading(rank)
    terms = rank.loading if loading else rank.terms
    needed = 0 if loading else answer.fit.needed_bytes(rank)
    room = rank.room_bytes - needed
    # Of a pool that is too small the page that stands for none is no free memory.
    null = rank.null_bytes if room < 0 and not loading else 0
    return {
        "weights": sum(term.nbytes for term in terms if term.name == "weights"),
        "overhead": sum(term.nbytes for term in terms if term.name != "weights"),
        "KV": needed + null,
        "free": 0 if loading else max(0, room) + rank.null_bytes - null + rank.unused_bytes,
        "reserve": max(0, rank.device.total_bytes - rank.budget_bytes),
        "short": rank.loading_short_bytes if loading else max(0, -room),
    }


def _rank(answer: PlanFindings, group: list[Rank], width: int, paint: Paint) -> Iterator[str]:
    rank = group[0]
    device, parts = rank.device, sizes(answer, rank)
    several = answer.question.settings.nodes > 1 and device.kind == "cpu"
    kind = "Node" if several else "GPU" if device.kind == "gpu" else "CPU"
    numbers = str(device.index) if len(group) == 1 else f"{device.index}-{group[-1].device.index}"
    of = f"{format_bytes(device.total_bytes)}, budget {format_bytes(rank.budget_bytes)}"
    each = "" if len(group) == 1 else ", each: the figures below are for one"
    yield from wrapped(f"{kind} {numbers}  {device.name}  {of}{each}", width, "", "  ")
    needed = max(1, rank.budget_bytes + parts["short"] if parts["short"] else device.total_bytes)
    yield "  " + _stacked(parts, needed, width - 4, paint)
    whole = max(1, sum(parts[name] for name, _, _ in SEGMENTS))
    bar = max(8, min(30, width - LABEL_WIDTH - 34))
    for name, mark, code in SEGMENTS:
        if name == "free" and parts["short"] and not parts["free"]:
            continue
        drawn = paint(_bar(parts[name], whole, bar, mark), code)
        note = _row_note(answer, rank, name)
        share = f"{100 * parts[name] / whole:5.1f}%"
        row = f"  {name:<{LABEL_WIDTH}}{drawn}  {format_bytes(parts[name]):>10}  {share}"
        yield row + (f"  {note}" if note and len(f"  {note}") + LABEL_WIDTH + bar + 23 <= width else "")
    if parts["short"]:
        drawn = paint(_bar(parts["short"], whole, bar, SHORT_MARK), SHORT_COLOUR)
        yield f"  {'short':<{LABEL_WIDTH}}{drawn}  {format_bytes(parts['short']):>10}"
        yield from wrapped(f"percentages are of {format_bytes(whole)}, the total it would need with the reserve", width)
    yield from _overhead(answer, rank, width)
    if device.held_by:
        yield from wrapped(f"held by other processes: {', '.join(device.held_by)}", width)


def _overhead(answer: PlanFindings, rank: Rank, width: int) -> Iterator[str]:
    if answer.fit.lacks_for_loading(rank):
        sums = f"{format_bytes(rank.loading_bytes)} with the weights, of {format_bytes(rank.budget_bytes)}"
        yield from wrapped(f"overhead while loading: {_spelled(rank.loading)}; {sums}", width)
        return
    yield from wrapped("overhead: " + _spelled(rank.terms), width)
    if rank.loading:
        staging = sum(term.nbytes for term in rank.loading if term.name == "staging")
        peak = f"{format_bytes(rank.loading_bytes)} at its peak"
        yield from wrapped(
            f"loading: {peak}, {format_bytes(staging)} of it staging, before the KV cache is allocated", width
        )


def _spelled(held: Iterable[Term]) -> str:
    terms = (term for term in held if term.name != "weights")
    return ", ".join(
        f"{term.name} {format_bytes(term.nbytes)}" + (f" ±{term.uncertainty:.0%}" if term.uncertainty else "")
        for term in terms
    )


def _row_note(answer: PlanFindings, rank: Rank, name: str) -> str:
    if name == "KV" and answer.fit.lacks_for_loading(rank):
        return "allocated after loading"
    if name == "KV":
        return f"{answer.fit.required_sequences} x {counted(answer.fit.required_tokens, 'token')}"
    if name == "free":
        more = max(0, rank.room_bytes - answer.fit.needed_bytes(rank)) + rank.null_bytes
        return f"{format_bytes(more)} of it for KV" if rank.unused_bytes > rank.null_bytes else "also for KV"
    if name == "weights" and answer.question.model.exact:
        return "as stored"
    return ""


def _bar(size: int, whole: int, width: int, mark: str) -> str:
    cells = round(width * size / whole)
    if size and not cells:
        cells = 1
    return (mark * min(width, cells)).ljust(width)


def _stacked(parts: dict[str, int], whole: int, width: int, paint: Paint) -> str:
    """What lies side by side. Where it does not fit, what lies beyond the budget is marked instead, and the reserve,
    which must stay free, is not drawn."""
    cells: list[tuple[str, str]] = []
    at = 0
    for name, mark, code in SEGMENTS:
        if name == "reserve" and parts["short"]:
            continue
        at += parts[name]
        cells += [(mark, code)] * (min(width, round(width * at / whole)) - len(cells))
    beyond = width - max(1, round(width * parts["short"] / whole)) if parts["short"] else width
    cells[beyond:] = [(SHORT_MARK, SHORT_COLOUR)] * len(cells[beyond:])
    drawn = "".join(
        paint("".join(mark for mark, _ in run), code) for code, run in groupby(cells, key=lambda one: one[1])
    )
    return f"[{drawn}{' ' * (width - len(cells))}]"


# Words


def _capacity(answer: PlanFindings, width: int, brief: bool) -> Iterator[str]:
    found, traffic = answer.fit, answer.question.traffic
    fixed = answer.kv_bytes_fixed_per_sequence
    each = f"KV {format_bytes(answer.kv_bytes_per_token)} per token ({found.kv_dtype})"
    if found.kv_bytes_per_token > answer.kv_bytes_per_token:
        drafts = answer.question.model.draft is not None
        more = "the draft model's" if drafts else "the copies on all ranks"
        each += f", {format_bytes(found.kv_bytes_per_token)} with {more}"
    each += f", and {format_bytes(fixed)} per sequence" if fixed else ""
    layered = answer.partly if answer.partly is not None and answer.partly.may_run else None
    placed = None
    if not answer.fits and answer.offload is not None and answer.offload.runs and answer.problem is None:
        placed = answer.offload.placement.plan
        yield f"{answer.offload.title}:"
    pool = f"the pool holds {counted((placed or found).kv_tokens, 'token')}"
    if layered is not None:
        pool = f"with {layered.placement} there is room for {counted(layered.kv_tokens, 'token')}"
    yield from wrapped(f"{each}; {pool}", width, "")
    if placed is not None:
        most = counted(answer.question.model.spec.max_position, "token")
        yield from wrapped(f"a context of {placed.limits.max_model_len:,} of {most}", width, "")
    elif answer.max_model_len:
        most = counted(answer.question.model.spec.max_position, "token")
        held = f"largest context {found.longest_tokens:,} of {most}"
        at = f"{counted(rounded_down(answer.concurrency), 'sequence')} of {answer.max_model_len:,} at once"
        yield from wrapped(f"{held}; {at}", width, "")
    if answer.as_requested is not None:
        refused = "; ".join(answer.as_requested.lacks) or answer.as_requested.notes[0]
        tokens = counted(max(0, answer.as_requested.kv_tokens or 0), "KV token")
        yield from wrapped(f"as {answer.vllm.name} sizes what was requested: {tokens}; {refused}", width, "")
    theirs = answer.commands.get(answer.engine or "")
    if theirs is not None and theirs.kv_tokens is not None and theirs.max_model_len is not None:
        tokens = f"a context of {theirs.max_model_len:,} and {counted(theirs.kv_tokens, 'KV token')}"
        of = "" if answer.commands_of == "plan" or answer.best is None else f" with remedy {answer.best + 1}"
        yield from wrapped(f"as {answer.vllm.name} sizes it{of}: {tokens}", width, "")
    if traffic is not None and answer.concurrency_at_traffic is not None:
        yield from wrapped(
            f"traffic ({traffic.source}): {traffic.concurrency} at once of {counted(traffic.length, 'token')}; "
            f"memory holds {counted(rounded_down(answer.concurrency_at_traffic), 'sequence').partition(' ')[0]}",
            width,
            "",
        )
    rate = answer.throughput
    if placed is not None and answer.offload is not None:
        if not brief:  # The section of its own has them.
            return
        rate = answer.offload.throughput
    elif brief and rate is None and answer.offload is not None and answer.offload.may_run:
        rate = answer.offload.throughput
        yield f"{answer.offload.title}:"
    if rate is None:
        why = answer.no_throughput if layered is None else "it depends on the CPU, which computes the other layers"
        yield from wrapped(str(why) if answer.from_disk else f"no throughput estimate: {why}", width, "")
        return
    for decode in (rate.one, rate.at_traffic, rate.largest):
        if decode is not None and (decode is rate.one or decode.batch > 1):
            at = f"{decode.batch:,} at once, {counted(rate.context_tokens, 'token')} in each"
            text = f"{at}: about {_tokens(decode.estimate)} tokens/s, limited by {decode.limited_by}"
            yield from wrapped(text, width, "")
            if decode is rate.at_traffic and decode.batch == rate.largest.batch:
                break
    prompts = f"prompts of {rate.prompt_tokens:,}: about {_tokens(rate.prefill)} tokens/s"
    yield from wrapped(f"{prompts}, limited by {rate.prefill_limited_by}", width, "")
    if not brief:
        yield from wrapped(f"rates: {rate.evidence}", width, "")


def _tokens(estimate: Estimate) -> str:
    digits = 1 if estimate.tokens_per_s < 10 else 0
    return f"{estimate.tokens_per_s:,.{digits}f} ({estimate.low:,.{digits}f} to {estimate.high:,.{digits}f})"


def _decisions(answer: PlanFindings, width: int) -> Iterator[str]:
    for decision in answer.decisions:
        yield from wrapped(decision.line(), width)


def _warnings(answer: PlanFindings, width: int, paint: Paint) -> Iterator[str]:
    for warning in answer.warnings:
        first, *rest = wrapped(f"{warning.code} {warning.message}", width)
        yield first.replace(warning.code, paint(warning.code, "33"), 1)
        yield from rest
        if warning.fix:
            yield from wrapped(f"fix: {warning.fix}", width, "    ")


def _ways_title(answer: PlanFindings, brief: bool) -> str:
    title = "Best remedy" if brief else "Remedies, in order of preference"
    # Beside a command for some layers: what it would take to have all of them there.
    return f"{title}, for all layers on the GPU" if answer.commands_of == "tiers" and answer.partly else title


def _ways(answer: PlanFindings, width: int, brief: bool) -> Iterator[str]:
    if not answer.fits and not answer.ways_out:
        yield "  none known: every configuration that was tried falls short"
    # How fast what is whole on a GPU is, beside what is not.
    in_ram = answer.offload is not None or any(way.tiers is not None for way in answer.ways_out)
    for number, way in enumerate(answer.ways_out, 1):
        if brief and number != (answer.best or 0) + 1:
            continue
        part = "" if way.meets_request else " (only part of what was requested)"
        yield from wrapped(f"{number:>2}. {way.change}{part}", width, "  ", "      ")
        if way.tiers is None:
            found = way.fit
            at_once = counted(rounded_down(found.concurrency(found.usual_tokens)), "sequence")
            held = f"{counted(found.limits.max_model_len, 'token')} of context, "
            held += f"{at_once} of {found.usual_tokens:,} at once"
            rate = throughput(found) if in_ram else None
            held += "" if rate is None else f", about {_tokens(rate.one.estimate)} tokens/s for one"
            yield from wrapped(held, width, "      ", "      ")
        if way.flags:
            yield from wrapped(way.flags, width, "      ", "      ")
        if way.note:
            yield from wrapped(way.note, width, "      ", "      ")


def _not_yet(answer: PlanFindings, width: int) -> Iterator[str]:
    for said in without_weights(answer.question.model):
        yield from wrapped(f"no command runs yet: {said}", width, "", "  ")


def _configurations(answer: PlanFindings, width: int) -> Iterator[str]:
    for name, configuration in (("safe", answer.safe), ("max", answer.max)):
        if configuration is not None:
            yield from wrapped(f"{name:<5}{_flags(configuration)}", width, "  ", "       ")
            yield from wrapped(configuration.reason, width, "       ", "       ")
            for said in configuration.sized_otherwise(answer.vllm):
                yield from wrapped(said, width, "       ", "       ")
    if answer.fits and answer.safe is None:
        yield from wrapped("safe: none; what was requested leaves no margin for the error of the estimates", width)


def _flags(configuration: Configuration) -> str:
    shown = ("gpu_memory_utilization", "max_model_len", "max_num_seqs")
    settings = configuration.settings
    return " ".join(f"--{name.replace('_', '-')} {settings[name]}" for name in shown if name in settings)


def _commands_title(answer: PlanFindings) -> str:
    if answer.commands_of == "tiers" and answer.partly is not None:
        return f"Command with {answer.partly.placement}"
    if answer.commands_of == "plan" or answer.best is None:
        return "Commands"
    if _of_several(answer):
        return "Commands, each of the first remedy that its engine runs"
    return f"Commands of remedy {answer.best + 1}: {answer.commands_of}"


def _of_several(answer: PlanFindings) -> bool:
    """Remedies: not all engines run the same."""
    return answer.engine is None and len({one.remedy for one in answer.commands.values() if not one.lacks}) > 1


def _commands(answer: PlanFindings, width: int) -> Iterator[str]:
    for name, command in answer.commands.items():
        if answer.engine is not None and name != answer.engine:
            continue
        if _of_several(answer) and command.remedy is not None and not command.lacks:
            kind = answer.ways_out[command.remedy - 1].kind
            command = replace(command, notes=(f"of remedy {command.remedy}: {kind}", *command.notes))
        yield from command_lines(command, width)


def command_lines(command: Command, width: int) -> list[str]:
    """The command first, broken after whole words with a backslash; then what must be known of it, as comments. Of one
    that the engine refuses only why: it would be pasted."""
    if command.lacks:
        command = replace(command, text="", nodes=(), notes=command.lacks)
    found: list[str] = []
    if not command.text:
        found.append(f"  {profile(command.engine).name}, no command:")
    elif command.nodes:
        found.append(f"  # {profile(command.engine).name} on {len(command.nodes)} nodes")
    last = len(command.nodes) - 1
    for node, text in enumerate(command.nodes[:SHOWN_NODES] or (command.text,)):
        if command.nodes:
            every = f"nodes {node} to {last}, each with its own --node-rank" if node == SHOWN_NODES - 1 < last else ""
            who = "node 0, the head: it serves the API" if node == 0 else every or f"node {node}"
            found.append(f"  # {who}")
        found += _broken(text, width)
    for note in command.notes:
        found += wrapped(note, width, "    # ", "    # ")
    return found


def _broken(text: str, width: int) -> list[str]:
    found, line = list[str](), " "
    for word in _words(text):
        if len(line) + 1 + len(word) > width - 2 and line.strip():
            found.append(f"{line} \\")
            line = "    "
        line += f" {word}"
    return [*found, line] if line.strip() else found


def _words(text: str) -> list[str]:
    """As they stand there, quotes and all; a leading VARIABLE=1 too."""
    return [shlex.quote(word) if "=" not in word.split("-")[0] else word for word in shlex.split(text)]


def _thumbs(answer: PlanFindings, width: int) -> Iterator[str]:
    for one in answer.rules_of_thumb:
        text = f"{one.name}: {one.rule} = {format_bytes(one.rule_bytes)}, exactly {format_bytes(one.exact_bytes)}"
        # One that comes close from below is still too little.
        enough = one.verdict == "right" or (one.right and one.rule_bytes >= one.exact_bytes)
        yield from wrapped(text if enough else f"{text}; {one.verdict}", width)
