"""The planner's answer to a question, whole: whether it fits, what to run, what to beware of and what else there is.

Puts together what the files beside it find out; as JSON it is in answer_json.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.observability.decisions import Decision
from holdfast.planner.advice.preset_margin import with_fixes
from holdfast.planner.advice.presets import Configuration, max_configuration, safe_configuration
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy, too_long
from holdfast.planner.advice.rules_of_thumb import Thumb, rules_of_thumb
from holdfast.planner.advice.throughput import Throughput, no_throughput_reason, throughput
from holdfast.planner.advice.warnings import PlanWarning, warnings
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands, parse_engine
from holdfast.planner.fit.search import Fit, Question, Rank, describe_budget, describe_devices, device_budget, fit
from holdfast.planner.inputs.question import KV_ELEMENT_BYTES
from holdfast.planner.report.json import document
from holdfast.planner.sizing.kv_cost import kv_cost
from holdfast.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanAnswer:
    """`print(answer)` draws it; `repr` is one line."""

    fit: Fit
    safe: Configuration | None
    max: Configuration | None
    warnings: tuple[PlanWarning, ...]
    ways_out: tuple[Remedy, ...]
    rules_of_thumb: tuple[Thumb, ...]
    throughput: Throughput | None
    no_throughput: str | None
    """Why there is none."""
    commands: dict[str, Command]
    """Of the plan; where it does not fit, of the first way out. Empty where there is none."""
    commands_of: str
    """plan, or the kind of that way out."""
    engine: str | None
    vllm: Vllm
    decisions: tuple[Decision, ...]

    @property
    def fits(self) -> bool:
        return self.fit.fits and self.problem is None

    @property
    def problem(self) -> str | None:
        """What stands in the way where it is not memory."""
        if not too_long(self.question):
            return None
        assert self.question.traffic is not None
        most = self.question.model.spec.max_position
        reach = counted(self.question.traffic.length, "token")
        return f"requests reach {reach}, but the model's context length is {most:,}"

    @property
    def lacks(self) -> tuple[str, ...]:
        """Why the engine that was asked for, or else Holdfast, does not run what fits; empty: it does."""
        command = self.commands.get(self.engine or "holdfast")
        return command.lacks if command is not None and self.fits else ()

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the model, once: copies on several ranks are not counted."""
        return self.question.model.spec.kv_bytes_per_token(KV_ELEMENT_BYTES[self.fit.kv_dtype])

    @property
    def kv_bytes_fixed_per_sequence(self) -> int:
        """What full windows and recurrent states hold of a sequence; of the model, once."""
        element, state = KV_ELEMENT_BYTES[self.fit.kv_dtype], KV_ELEMENT_BYTES[self.fit.dtype]
        whole = kv_cost(self.question.model.spec, element_bytes=element, state_bytes=state)
        return whole.window_bytes + whole.fixed_bytes

    @property
    def question(self) -> Question:
        return self.fit.question

    @property
    def max_model_len(self) -> int:
        """What would be served; where that was asked for and does not fit, the longest that does."""
        return min(self.fit.limits.max_model_len, self.fit.longest_tokens)

    @property
    def concurrency(self) -> float:
        """Sequences of that length side by side."""
        return self.fit.concurrency(self.max_model_len) if self.max_model_len else 0.0

    @property
    def concurrency_at_traffic(self) -> float | None:
        traffic = self.question.traffic
        return None if traffic is None or too_long(self.question) else self.fit.concurrency(max(1, traffic.length))

    @property
    def replicas(self) -> int:
        """Servers like this one that the machine holds side by side; 0: not one."""
        if not self.fits:
            return 0
        least = min(rank.budget_bytes for rank in self.fit.ranks)
        devices = self.question.machine.devices
        large = sum(device_budget(device, self.fit.utilization) >= least for device in devices)
        return large // len(self.fit.ranks)

    def to_json(self) -> dict[str, Any]:
        return document(self)

    def __repr__(self) -> str:
        said = "fits" if self.fits else self.problem or f"{format_bytes(self.fit.short_bytes)} short"
        return (
            f"<PlanAnswer {self.question.model.name} on {describe_devices(self.question.machine.all_devices)}: {said}>"
        )

    def __str__(self) -> str:
        from holdfast.planner.report.text import lines

        return "\n".join(lines(self))


def answer(question: Question, *, engine: str | None = None) -> PlanAnswer:
    """`engine`: whose commands are wanted, as `holdfast plan --for` takes it. An impossible question is refused."""
    name, vllm = (None, Vllm()) if engine is None else parse_engine(engine)
    found = fit(replace(question, engine=name))
    ways = ways_out(found)
    unreadable = too_long(question)
    rate = None if unreadable else throughput(found)
    fits = found.fits and not unreadable
    shown, of = (found, "plan") if fits else _best(ways)
    safe = safe_configuration(found) if fits else None
    printed = {} if shown is None else commands(shown, sequences=shown.limits.max_num_seqs, vllm=vllm)
    return PlanAnswer(
        fit=found,
        safe=safe,
        max=max_configuration(found) if fits else None,
        warnings=with_fixes(warnings(found), found, safe),
        ways_out=ways,
        rules_of_thumb=rules_of_thumb(found),
        throughput=rate,
        no_throughput=None if rate is not None else _no_rate(found),
        commands=printed,
        commands_of=of,
        engine=name,
        vllm=vllm,
        decisions=(*found.decisions, *_budgets(found), *_as_the_engine(printed.get(name or ""), vllm)),
    )


def _as_the_engine(command: Command | None, vllm: Vllm) -> Iterator[Decision]:
    """How the engine that was asked for would size it, where that is known of its version."""
    if command is None or command.kv_tokens is None:
        return
    value = f"{command.kv_tokens:,} KV tokens, a context of {command.max_model_len:,}"
    why = "; ".join(command.reasons) or "it stores KV as the plan does"
    yield Decision("vllm", value, f"as {vllm.name} sizes it: {why}", "version")


def _no_rate(found: Fit) -> str:
    return "requests are longer than the model's context" if too_long(found.question) else no_throughput_reason(found)


def _best(ways: tuple[Remedy, ...]) -> tuple[Fit | None, str]:
    for way in ways:
        if way.available and way.fit.fits:
            return way.fit, way.kind
    return None, "none"


def _budgets(found: Fit) -> list[Decision]:
    """One for each kind of device, where they are not alike."""
    groups: dict[tuple[str, str], list[Rank]] = {}
    for rank in found.ranks:
        groups.setdefault((rank.device.name, describe_budget(rank, found.utilization)), []).append(rank)
    decisions = []
    for (name, value), ranks in groups.items():
        device = ranks[0].device
        source = "measured" if device.measured else "catalogue" if device.gpu is not None else "set"
        every = "" if len(ranks) == 1 else f" on each of {len(ranks)}"
        decisions.append(Decision("budget", value, f"usable memory of {name}{every}", source))
    return decisions
