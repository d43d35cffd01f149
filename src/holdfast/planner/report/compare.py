"""Answers side by side: one row a plan, the columns that people choose by. Works out nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.planner.fit.search import describe_devices
from holdfast.planner.report.answer import PlanAnswer
from holdfast.planner.report.wrapping import LEAST_WIDTH, Paint, rounded_down, wrapped
from holdfast.units import counted, format_bytes

COLUMNS = ("fits", "weights", "KV/token", "context", "at once", "tok/s", "tok/s max")
SPARED = ("KV/token", "tok/s max", "weights")
NAME_WIDTH = 20


def compare_lines(answers: Sequence[PlanAnswer], width: int = 80, colour: bool = False) -> list[str]:
    """One row a plan, the columns that people choose by."""
    width, paint = max(LEAST_WIDTH, width), Paint(colour)
    names, figures = _names(answers), [_figures(answer) for answer in answers]
    columns = [column for column in COLUMNS if column not in _too_many(figures, width)]
    widths = {column: max(len(column), *(len(row[column]) for row in figures)) for column in columns}
    first = min(max(map(len, names)), width - sum(widths.values()) - 2 * len(columns))
    head = "  ".join([" " * first, *(column.rjust(widths[column]) for column in columns)])
    found = [paint.title(head)]
    for name, row in zip(names, figures, strict=True):
        cells = [_cut(name, first).ljust(first), *(row[column].rjust(widths[column]) for column in columns)]
        found.append("  ".join(cells))
    for name, answer in zip(names, answers, strict=True):
        if not answer.fits and answer.ways_out:
            found += wrapped(f"{name}: {answer.ways_out[0].change}", width, "", "  ")
        elif answer.lacks:
            found += wrapped(f"{name}: fits, but {answer.lacks[0]}", width, "", "  ")
    found += [line for said in _beside(answers, names) for line in wrapped(said, width, "", "  ")]
    # Of a plan that holds no token there is no length.
    lengths = {answer.fit.usual_tokens for answer in answers if answer.fit.limits.max_model_len}
    if not lengths:
        return found
    # A plan with a shorter context, or with layers that are streamed, is counted with shorter ones.
    fewest, most = min(lengths), max(lengths)
    each = counted(most, "token") if fewest == most else f"{fewest:,} to {most:,} tokens, each plan's own,"
    return found + wrapped(f"at once: sequences of {each} that fit in the KV cache", width, "", "  ")


def _beside(answers: Sequence[PlanAnswer], names: Sequence[str]) -> Iterator[str]:
    """What no column tells: the machine where all have the same, and number types where they differ."""
    machines = {_machine(answer) for answer in answers}
    if len(machines) == 1:
        least = min(rank.budget_bytes for answer in answers for rank in answer.fit.ranks)
        each = " of each" if len(answers[0].question.machine.all_devices) > 1 else ""
        yield f"all on {machines.pop()}: {format_bytes(least)} usable{each}"
    if len({answer.fit.dtype for answer in answers}) > 1:
        for name, answer in zip(names, answers, strict=True):
            reason = next((one.reason for one in answer.fit.decisions if one.field == "dtype"), "as set")
            yield f"{name}: dtype {answer.fit.dtype}: {reason}"


def _names(answers: Sequence[PlanAnswer]) -> list[str]:
    """By what differs: the model, the machine, or both; where nothing does, by both."""
    models = [answer.question.model.name for answer in answers]
    machines = [_machine(answer) for answer in answers]
    if len(set(machines)) == 1 < len(set(models)):
        return models
    if len(set(models)) == 1 < len(set(machines)):
        return machines
    return [f"{model} on {machine}" for model, machine in zip(models, machines, strict=True)]


def _machine(answer: PlanAnswer) -> str:
    """All of it, so that two of the same kind can be told apart even where a plan uses one."""
    return describe_devices(answer.question.machine.all_devices)


def _too_many(figures: Sequence[Mapping[str, str]], width: int) -> tuple[str, ...]:
    """Columns to leave out so that names keep some room, the least telling first."""
    for count in range(len(SPARED) + 1):
        left = [column for column in COLUMNS if column not in SPARED[:count]]
        taken = sum(2 + max(len(column), *(len(row[column]) for row in figures)) for column in left)
        if width - taken >= NAME_WIDTH:
            return SPARED[:count]
    return SPARED


def _figures(answer: PlanAnswer) -> dict[str, str]:
    found, rate = answer.fit, answer.throughput
    return {
        "fits": "yes" if answer.fits else f"-{format_bytes(found.short_bytes)}" if found.short_bytes else "too long",
        "weights": format_bytes(found.weights_bytes),
        "KV/token": format_bytes(answer.kv_bytes_per_token),
        "context": f"{answer.max_model_len:,}",
        "at once": f"{rounded_down(found.concurrency(found.usual_tokens)):.1f}",
        "tok/s": "?" if rate is None else f"{rate.one.estimate.tokens_per_s:,.0f}",
        "tok/s max": "?" if rate is None else f"{rate.largest.estimate.tokens_per_s:,.0f}",
    }


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
