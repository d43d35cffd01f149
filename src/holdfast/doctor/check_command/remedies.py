"""A plan's ways out as changes of a command: in the engine's own words, what can be run first; and a command with the
changes of its findings.

Plans nothing itself; what is no change of this command is said in words.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.doctor.build_finding import changed
from holdfast.doctor.check_command.layer_partition import without_own_cut
from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.findings import Confidence, Finding, Fix, overall
from holdfast.engine_profiles.profile import profile
from holdfast.units import MIB

if TYPE_CHECKING:
    from holdfast.planner.advice.remedy import Remedy
    from holdfast.planner.report.answer import PlanAnswer

WAYS_SHOWN = 4
MADE_BY_VLLM = ("fp8", "nf4")
"""While it loads."""


def ways(command: ServerCommand, told: PlanAnswer) -> list[Fix]:
    """Those that can be run first, in the plan's order; of what has to be made or bought the first alone. Another model
    comes last: it answers something else. A plan in tiers is none: nothing here runs it."""
    offered = [way for way in told.ways_out if way.tiers is None and _applies(command, way)]
    # Python's engines read a GGUF with a plugin or slowly, if at all: what they read comes before it.
    offered.sort(key=lambda way: command.engine in ("vllm", "sglang") and _is_gguf(way))
    fixes = [_fix(command, way) for way in offered if way.kind != "smaller_model"]
    others = [_fix(command, way) for way in offered if way.kind == "smaller_model"]
    ready = [fix for fix in fixes if fix.command is not None]
    made = [fix for fix in fixes if fix.command is None][: 2 if ready else WAYS_SHOWN]
    return [*ready[:WAYS_SHOWN], *made, *others[:1]]


def copies(command: ServerCommand, told: PlanAnswer) -> list[Fix]:
    """Published copies of the model, quantized."""
    offered = [way for way in told.ways_out if way.kind == "quantization" and way.available and "model" in way.settings]
    return [fix for fix in (_fix(command, way) for way in offered) if fix.command is not None]


def _is_gguf(way: Remedy) -> bool:
    return way.kind == "quantization" and way.fit.question.model.format == "gguf"


def _applies(command: ServerCommand, way: Remedy) -> bool:
    """SGLang's share is of another thing. What is quantized while loading was planned as vLLM or Holdfast does it."""
    if command.engine == "sglang" and "gpu_memory_utilization" in way.settings:
        return False
    return command.engine in ("vllm", "holdfast") or way.settings.get("quantization") not in MADE_BY_VLLM


def _fix(command: ServerCommand, way: Remedy) -> Fix:
    """A remedy as a change of this command; where it is none, in words."""
    spelled = {name: _spelled(command, name, value) for name, value in way.settings.items() if name != "model"}
    changes = dict[str, str | None](theirs for theirs in spelled.values() if theirs is not None)
    changes |= without_own_cut(command, way)
    price, model = way.note or way.price, way.settings.get("model")
    if None in spelled.values() or not way.available or not way.settings:
        return Fix(changes={}, why=way.change, price=price)
    why = f"{way.change}; planned: it fits"
    if model is None:
        return changed(command, changes, why, price, basis="planned")
    other = parse_command(shlex.join(str(model) if word == command.model else word for word in command.words))
    if way.kind == "quantization" and command.value("quantization") is not None:
        changes["--quantization"] = None  # A checkpoint that is quantized already is refused with another method.
    text = None if other is None else other.with_changes(changes)
    return Fix(command=text, changes={"--model": str(model), **changes}, why=why, price=price, basis="planned")


def fixes_of(finding: Finding) -> list[Fix]:
    """All of them, the best first."""
    return [fix for fix in (finding.fix, *finding.alternatives) if fix is not None]


def with_fixes(finding: Finding, fixes: Sequence[Fix], sure: Confidence | None = None) -> Finding:
    """As sure as the new first fix allows; `sure`: of the cause, where that is another too."""
    first, cause = fixes[0] if fixes else None, sure or finding.cause_confidence
    return msgspec.structs.replace(
        finding, confidence=overall(cause, first), cause_confidence=cause, fix=first, alternatives=list(fixes[1:])
    )


def _spelled(command: ServerCommand, name: str, value: object) -> tuple[str, str] | None:
    """A setting in the engine's words; None: it has none for it."""
    if name == "ram_bytes":
        own = command.engine == "holdfast" and isinstance(value, int)
        return ("--ram", f"{-(-int(str(value)) // MIB)}MiB") if own else None
    if name == "quantization" and command.engine == "holdfast":
        return "--quantization", str(value)
    ours = name.replace("_", "-")
    theirs = profile(command.engine).spelling(ours) if ours in profile("vllm").planned else None
    if theirs is None:
        return None
    if command.engine == "llama.cpp" and name == "max_model_len":
        slots = command.value("parallel")
        return theirs, str(int(str(value)) * (int(slots) if slots is not None and slots.isdecimal() else 1))
    if command.engine == "sglang" and name == "kv_cache_dtype":
        return theirs, "fp8_e4m3"
    return theirs, str(value)


def all_changes(findings: Sequence[Finding]) -> dict[str, str | None]:
    """What mends them together; of another model only its own command does."""
    fixes = [one.fix for one in findings if one.fix is not None and "--model" not in one.fix.changes]
    return {flag: value for fix in fixes for flag, value in fix.changes.items()}


def put_right(command: ServerCommand, wrong: Sequence[Finding]) -> ServerCommand:
    changes = all_changes(wrong)
    return (parse_command(command.with_changes(changes)) or command) if changes else command


def mendable(findings: Sequence[Finding]) -> bool:
    """By changes of the command alone, with its own model."""
    return all(one.fix is not None and one.fix.changes and "--model" not in one.fix.changes for one in findings)
