"""`holdfast doctor --command`: a command that starts a server, judged before it is run.

    flags     do they exist, are their values possible           flags.py
    settings  what Holdfast refuses of its own, there             own_settings.py
    plan      does it fit this machine, or the one that is named  the planner, as the engine itself would size it
    beyond    what no plan has a setting for                      unplanned.py
    ways out  as changes of this command                          remedies.py

Every value that is offered as a fix has been planned. Runs nothing and downloads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from holdfast.doctor.build_finding import Confidence, changed, found
from holdfast.doctor.check_command.checkpoint_format import stored_otherwise, would_not_run
from holdfast.doctor.check_command.flags import flag_findings
from holdfast.doctor.check_command.gpu_split import DRAFT, Split, divided, longest_tokens, split_of
from holdfast.doctor.check_command.layer_partition import ill_cut, other_cut
from holdfast.doctor.check_command.own_settings import settings_findings
from holdfast.doctor.check_command.refusals import (
    BEYOND_MODEL,
    SHORTER,
    no_model,
    no_weights,
    not_a_command,
    pool_bytes,
    refused,
    vllm_on_a_cpu,
)
from holdfast.doctor.check_command.remedies import (
    MADE_BY_VLLM,
    all_changes,
    copies,
    fixes_of,
    mendable,
    put_right,
    ways,
    with_fixes,
)
from holdfast.doctor.check_command.to_question import CommandMachine, question_for, replicas, without_draft
from holdfast.doctor.check_command.unplanned import (
    budget_words,
    draft_model,
    draft_too_large,
    drafts_itself,
    ill_divided,
    not_planned,
    stretched,
    too_many_replicas,
)
from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.command.shell import OpenQuote
from holdfast.doctor.findings import Diagnosis, Evidence, Finding, Fix, RootCause
from holdfast.doctor.probe.installed_version import version_of
from holdfast.doctor.report.text import changes_of
from holdfast.engine_profiles.profile import profile
from holdfast.errors import ConfigurationError, HoldfastError, ModelError
from holdfast.observability.codes import codes
from holdfast.units import format_bytes, shorten

__all__ = ["CommandMachine", "judge", "judge_command"]

if TYPE_CHECKING:
    from holdfast.planner.advice.warnings import PlanWarning
    from holdfast.planner.fit.search import Question
    from holdfast.planner.report.answer import PlanAnswer

_WARNED: dict[str, tuple[str, RootCause]] = {
    "HFW20": ("utilization_too_high", "configuration_overshoot"),
    "HFW21": ("utilization_too_high", "configuration_overshoot"),
    "HFW22": ("utilization_too_low", "configuration_overshoot"),
    "HFW27": ("tensor_parallel_unused", "configuration_overshoot"),
    "HFW29": ("free_memory_below_utilization", "configuration_overshoot"),
    "HFW32": ("dtype_unsupported_gpu", "not_memory"), "HFW33": ("dtype_unsupported_gpu", "not_memory"),
}  # fmt: skip
"""What a plan warns of and a doctor names; the rest is advice of the plan's own."""
_IDLE = "HFW27"
_OF_SIZING = ("it would refuse: ", "pool holds no sequence", "KV cache does not hold a ")
"""In the planner's reasons: those that are about the size of the KV pool."""
_NO_GPU = "a GPU: this machine has none; name the one that the command is for: --gpu rtx4090"
_NO_DRAFT_LAYERS = "a plan of the model's draft layers: their shapes are not known"
_NO_DRAFT_MODEL = "a plan of the draft model: its shapes are not known"
_ON_THIS_CPU = (
    "this machine has no GPU, so the command is checked for its CPU; --gpu NAME or --vram SIZE checks it for another"
)
_LESS_SURE: dict[str, Confidence] = {"high": "medium", "medium": "low"}
"""Of a command for a GPU that is judged for a CPU: it is likely meant for another machine."""
_SHARE = "utilization_too_high"
ROUNDS = 3
REPLANNED = ("heads_not_divisible", "tensor_parallel_mismatch", "bad_flag", "quant_shape_mismatch")
"""What is put right before it is planned again."""


Judged = tuple[list[Finding], list[str], list[str]]


def judge_command(text: str, *, machine: CommandMachine | None = None, version: str | None = None) -> Diagnosis:
    """`version`: of the engine; left out, that of the program which the command names, where it is installed here."""
    try:
        command = parse_command(text, strict=True)
    except OpenQuote as error:
        raise ConfigurationError(
            "a quote in the command is not closed",
            needed="as many closing quotes as opening ones",
            found=shorten(str(error), 60),
            fix="close it, and quote the whole command",
            field="command",
        ) from None
    if command is None:
        raise not_a_command(text)
    return judge(command, machine=machine, version=version)


def judge(
    command: ServerCommand,
    *,
    machine: CommandMachine | None = None,
    version: str | None = None,
    runs_here: bool = False,
) -> Diagnosis:
    """`runs_here`: it is about to be run on this machine, so that nothing else can be meant."""
    engine_version = version or command.version or version_of(command.engine, command.words)
    wrong = flag_findings(command, engine_version)
    findings, missing, seen = list(wrong), list[str](), list[str]()
    right = command
    # What is planned is the command as it would be with its faults put right, until a plan finds no other: a parallel
    # size that is possible may still be one that does not fit.
    for _ in range(ROUNDS):
        right = put_right(command, findings)
        found_now, missing, seen = _planned_together(right, machine or CommandMachine(), engine_version, runs_here)
        offered = right.value("tensor-parallel-size") != command.value("tensor-parallel-size")
        findings += [
            one
            for one in found_now
            # A size that was not asked for, but offered, is no fault of the command.
            if one.what not in {known.what for known in findings} and not (offered and one.code == _IDLE)
        ]
        again = [one for one in found_now if one.cause in REPLANNED and one.fix is not None and one.fix.changes]
        if not again:
            break
    missing += [f"a plan of {name}: it is not planned" for name in not_planned(command)]
    return Diagnosis(
        engine=command.engine,
        engine_version=engine_version,
        command=command.with_changes({}),
        phase="args" if wrong else None,
        healthy=not findings and not missing,
        findings=_whole(command, findings),
        missing=missing,
        seen=seen,
    )


def _whole(command: ServerCommand, findings: list[Finding]) -> list[Finding]:
    """Several faults have one command that mends them all."""
    if len(findings) < 2:
        return findings
    every = all_changes(findings)
    text = command.with_changes(every)
    other = next((one.fix for one in findings if one.fix is not None and "--model" in one.fix.changes), None)
    if other is not None and other.command is not None:
        # Planned with the other faults put right: without that model, no command of these would start.
        return [_with_other_model(one, other) for one in findings]

    def mended(fix: Fix | None) -> Fix | None:
        if fix is None or not fix.changes or "--model" in fix.changes:
            return fix
        others = Fix(changes={flag: value for flag, value in every.items() if flag not in fix.changes})
        beside = f"; in the same command, for the other findings: {changes_of(others)}" if others.changes else ""
        return msgspec.structs.replace(fix, command=text, why=f"{fix.why}{beside}")

    return [msgspec.structs.replace(one, fix=mended(one.fix)) for one in findings]


def _with_other_model(finding: Finding, other: Fix) -> Finding:
    fix = finding.fix
    if fix is None or fix is other or not fix.changes or "--model" in fix.changes:
        return finding
    why = f"{fix.why}; alone it does not fit, with the model of another finding it does"
    return msgspec.structs.replace(finding, fix=msgspec.structs.replace(fix, command=other.command, why=why))


# The plan


def _planned_together(command: ServerCommand, machine: CommandMachine, version: str | None, runs_here: bool) -> Judged:
    """A share that is too high is put right first: what is offered beside it has to fit with the lower one, since one
    command has both."""
    judged = _planned(command, machine, version, runs_here)
    share = next((one for one in judged[0] if one.cause == _SHARE and one.fix is not None and one.fix.changes), None)
    if share is None or share.fix is None or len(judged[0]) == 1:
        return judged
    (flag, value), *_ = share.fix.changes.items()
    found_lower, missing, seen = _planned(put_right(command, [share]), machine, version, runs_here)
    if mendable(found_lower) or not mendable([one for one in judged[0] if one is not share]):
        said = f"counted with {flag} {value}, as offered below, instead of {command.value(flag)}"
        return [*found_lower, share], missing, [*seen, said]
    # With a lower share nothing that can be set would do: it is said, and not put into the command.
    advice = with_fixes(share, [Fix(why=f"{share.fix.why}, and a smaller model or a larger GPU")])
    return [advice if one is share else one for one in judged[0]], *judged[1:]


def _planned(command: ServerCommand, machine: CommandMachine, version: str | None, runs_here: bool) -> Judged:
    """Findings, what is missing, and what was planned."""
    if not profile(command.engine).planned:
        return [], [f"a plan: commands of {command.engine} are parsed, but not planned"], []
    if command.model is None and command.engine != "holdfast":
        return [], ["the model: the command names none"], []
    try:
        question = question_for(command, machine, version)
    except ModelError as error:
        return *no_model(command, error, elsewhere=machine.named), []
    except HoldfastError as error:
        return *refused(command, error, None), []
    from holdfast.planner.fit.search import describe_devices
    from holdfast.planner.models.speculation import DRAFT_LAYERS

    devices = describe_devices(question.machine.all_devices)
    on_cpu = question.machine.kind == "cpu"
    doubtful = on_cpu and command.engine == "vllm" and not machine.named and not _for_a_cpu(command, version)
    first = [_ON_THIS_CPU] if doubtful and not runs_here else []
    seen = [*first, f"planned for {'' if machine.named else 'this machine: '}{devices}"]
    otherwise = None if machine.named else no_weights(command, question)  # A path may be of that machine.
    otherwise = otherwise or stored_otherwise(command, question) or ill_cut(command, question)
    if otherwise is not None:
        return [otherwise], [], seen
    if on_cpu and command.engine == "vllm":
        findings = list(vllm_on_a_cpu(command, question))
        if findings or pool_bytes(command) is not None:
            return findings, [], seen
    if on_cpu and command.engine == "sglang":
        return [], [_NO_GPU], seen
    settings = settings_findings(command, question, here=not machine.named)
    if settings:
        return settings, [], seen
    try:
        findings, told, split = _answered(command, question, version, machine)
        if first:
            findings = [with_fixes(one, fixes_of(one), _LESS_SURE.get(one.cause_confidence, "low")) for one in findings]
        other = [_NO_GPU] if doubtful and findings else []
        if drafts_itself(command) and DRAFT_LAYERS not in question.model.spec.unsupported:
            other.append(_NO_DRAFT_LAYERS)
        if draft_model(command) is not None and question.model.draft is None:
            other.append(_NO_DRAFT_MODEL)
        spare = told.fits and len(told.fit.ranks) * replicas(command) < len(question.machine.devices)
        idle = [f"{one.message}; {one.fix}" for one in told.warnings if one.code == _IDLE and spare]
        words = budget_words(command, told, split)
        if not told.fits and told.offload is not None:
            words += f"; {told.offload.verdict_naming('--nvme-path DIR')}"
        return findings, other, [*first, f"{seen[-1]}; {words}", *idle]
    except HoldfastError as error:
        if error.code == BEYOND_MODEL and stretched(command):
            return [], [f"a plan: {error.message}, and RoPE scaling is not planned"], seen
        if error.code == BEYOND_MODEL and profile(command.engine).data.get("serves-beyond-trained"):
            return _beyond_trained(command, machine, version, question.model.spec.max_position, runs_here=runs_here)
        return *refused(command, error, question), seen


def _beyond_trained(
    command: ServerCommand, machine: CommandMachine, version: str | None, most: int, *, runs_here: bool
) -> Judged:
    """Planned with the length that the model was trained for; the rest is a warning, as the engine itself has it."""
    flag = profile(command.engine).spelling("max-model-len") or "--ctx-size"
    shorter = parse_command(command.with_changes({flag: str(most)})) or command
    if shorter.value(flag) == command.value(flag):
        return [], [], []
    findings, missing, seen = _planned(shorter, machine, version, runs_here)
    warning = (
        f"{command.engine} serves a context above the trained {most:,} tokens with a warning: answers get worse beyond"
        f" it, and its KV takes more; {most:,} is what was planned ({flag} {most})"
    )
    return findings, missing, [*seen, warning]


def _for_a_cpu(command: ServerCommand, version: str | None) -> bool:
    """vLLM that says itself that a CPU is meant."""
    named = command.value("device") == "cpu" or any(name.startswith("VLLM_CPU_") for name in command.environment)
    return named or "cpu" in (version or "")


def _answered(
    command: ServerCommand, question: Question, version: str | None, machine: CommandMachine
) -> tuple[list[Finding], PlanAnswer, Split | None]:
    from holdfast.planner.report.answer import answer

    engine = f"vllm=={version}" if command.engine == "vllm" and version is not None else command.engine
    theirs = any(command.has(name) for name in ("cpu-offload-gb", "n-cpu-moe", "n-gpu-layers"))
    offloaded = theirs and command.engine != "holdfast"  # Ours is planned.
    split = None if offloaded else split_of(command, question)
    if split is not None and not split.settable:
        return *_no_split_does(command, question, split, engine, version, machine), split
    told = answer(question if split is None else divided(question, split), engine=engine)
    findings: list[Finding] = []
    ill = None if split is None else ill_divided(command, split, told.fit.required_tokens)
    if ill is not None:
        findings.append(ill)
    elif split is None and not told.fits and not offloaded and not _streams(told):
        finding = _drafted_too_much(command, told, engine) or _does_not_fit(command, told)
        published = _published(command, version, machine, engine)
        findings.append(with_fixes(finding, [*published, *fixes_of(finding)]) if published else finding)
    elif told.fits and told.lacks:
        findings += _would_refuse(command, told, question, engine, sizes_itself=split is None)
    findings += too_many_replicas(command, told)
    said = {one.cause for one in findings}
    for warning in told.warnings:
        if warning.code == _IDLE and (told.fits or command.engine == "holdfast"):
            continue  # Nothing is wrong with that, and it is said beside the plan; Holdfast takes one GPU in any case.
        if warning.code in _WARNED and _WARNED[warning.code][0] not in said:
            findings.append(_warned(command, warning))
    return findings, told, split


def _published(command: ServerCommand, version: str | None, machine: CommandMachine, engine: str) -> list[Fix]:
    """Where the engine is to quantize while it loads, and that does not fit: a copy in fewer bits, without the flag."""
    from holdfast.planner.report.answer import answer

    bare = parse_command(command.with_changes({"--quantization": None}))
    if command.engine != "vllm" or command.value("quantization") not in MADE_BY_VLLM or bare is None:
        return []
    return copies(command, answer(question_for(bare, machine, version), engine=engine))[:1]


def _streams(told: PlanAnswer) -> bool:
    """Whether Holdfast serves it with layers in RAM that is known to be there, as `holdfast plan` decides it too."""
    return told.offload is not None and told.offload.runs


def _given_ram(told: PlanAnswer) -> list[Fix]:
    """Where it is not known how much RAM there is: the same command runs with enough of it."""
    if told.offload is None or told.offload.known or not told.offload.may_run:
        return []
    why = f"the same command {told.offload.verdict}; --ram SIZE tells what the machine has"
    return [Fix(why=why, price="slow: they cross the bus in every step", basis="first_try")]


def _drafted_too_much(command: ServerCommand, told: PlanAnswer, engine: str) -> Finding | None:
    """Where the model fits without its draft model; None: it has none, or does not fit either way."""
    from holdfast.planner.report.answer import answer

    if told.question.model.draft is None:
        return None
    alone = answer(without_draft(told.question), engine=engine)
    if not alone.fits:
        return None
    rank = min(told.fit.ranks, key=lambda one: one.room_bytes)
    draft = sum(term.nbytes for term in rank.terms if term.name == DRAFT)
    kv = told.fit.needed_bytes(rank) - alone.fit.needed_bytes(min(alone.fit.ranks, key=lambda one: one.room_bytes))
    # With the limits that the draft is planned with: without it, steps may be larger.
    return draft_too_large(command, draft, kv, max(0, draft + kv - told.fit.short_bytes), ways(command, told))


def _no_split_does(
    command: ServerCommand, question: Question, split: Split, engine: str, version: str | None, machine: CommandMachine
) -> tuple[list[Finding], PlanAnswer]:
    """Whatever the flag of the split is set to: what else would do, with the flag as high as can be, or without it."""
    from holdfast.planner.advice.search import first_that_fits
    from holdfast.planner.report.answer import answer

    bare = split_of(command, without_draft(question))
    if split.draft_bytes and bare is not None and bare.settable:
        kv, left = split.needed_bytes - bare.needed_bytes, max(0, bare.room_bytes - bare.needed_bytes)
        drafted = draft_too_large(command, split.draft_bytes, kv, left, [])
        return [drafted], answer(divided(question, None), engine=engine)
    base, most = dict[str, str | None]({split.flag: None}), max(0.01, split.most_share)
    if split.share is not None:
        split = split.with_share(most)
        base, question = {split.flag: f"{most:g}"}, divided(question, split)
    best = parse_command(command.with_changes(base)) or command
    told = answer(question, engine=engine)
    finding, plain = _does_not_fit(best, told), _does_not_fit(command, told)
    if split.share is not None and finding.cause == "kv_cache_too_small_for_max_len":
        finding = msgspec.structs.replace(finding, what=f"{finding.what}, with a static share of {most:g}")
    length, longest = profile(best.engine).spelling("max-model-len") or "", 0
    if split.share is not None:
        longest = longest_tokens(told.fit, split)
    fixes = []
    for one, alone in zip(fixes_of(finding), fixes_of(plain), strict=False):
        if list(one.changes) == [length] and longest > 0:
            why = "the longest context that fits; planned: it fits"
            one = changed(best, {length: str(longest)}, why, one.price, basis="planned")
        with_base = msgspec.structs.replace(one, changes={**base, **one.changes})
        held = first_that_fits([alone, with_base], lambda fix: _holds(fix.command, machine, version))
        fixes += [alone] if one.command is None else [] if held is None else [held[0]]
    return [with_fixes(finding, fixes)], told


def _holds(text: str | None, machine: CommandMachine, version: str | None) -> bool | None:
    """Whether a command divides a GPU so that it holds one sequence and its steps; None: it does not."""
    command = None if text is None else parse_command(text)
    if command is None:
        return None
    split = split_of(command, question_for(command, machine, version))
    return split is None or split.needed_bytes <= split.pool_bytes <= split.room_bytes or None


def _evidence(*lines: str) -> list[Evidence]:
    return [Evidence(line=line, source="plan") for line in lines]


def _does_not_fit(command: ServerCommand, told: PlanAnswer) -> Finding:
    fit = told.fit
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    terms = sorted(rank.terms, key=lambda term: -term.nbytes)
    weights = sum(term.nbytes for term in rank.terms if term.name == "weights")
    lines = [f"budget {format_bytes(rank.budget_bytes)} on {rank.device.name}"]
    lines += [f"{term.name} {format_bytes(term.nbytes)}" for term in terms[:3]]
    fixes = [*_given_ram(told), *other_cut(command, told), *ways(command, told)]
    configured = any(way.kind in ("utilization", "context", "sequences", "configuration") for way in told.ways_out)
    budget = format_bytes(rank.budget_bytes)
    if weights > rank.budget_bytes:
        cause, what = "weights_do_not_fit", f"the weights alone take {format_bytes(weights)} of {budget}"
    elif rank.room_bytes <= 0:
        cause, what = "no_memory_for_kv_blocks", f"everything but KV fills the {budget}: nothing is left for KV"
    else:
        needed = fit.needed_bytes(rank)
        cause = "kv_cache_too_small_for_max_len"
        what = (
            f"one sequence of {fit.required_tokens:,} tokens needs {format_bytes(needed)} of KV, and"
            f" {format_bytes(rank.room_bytes)} are left"
        )
    unused = next((way for way in told.ways_out if way.kind == "idle_gpus"), None)
    idle = len(told.question.machine.devices) - len(fit.ranks)
    if unused is not None and idle > 0 and command.value("tensor-parallel-size") is None:
        cause, what = "tensor_parallel_unused", f"{what}; and {idle} more GPU{'s are' if idle > 1 else ' is'} idle"
        fixes.sort(key=lambda fix: profile(command.engine).spelling("tensor-parallel-size") not in fix.changes)
    settable = any(fix.changes and "--model" not in fix.changes for fix in fixes)
    root: RootCause = "configuration_overshoot" if settable else "does_not_fit"
    if cause == "kv_cache_too_small_for_max_len" and configured:
        root = "kv_blowout"
    numbers = {"short_bytes": fit.short_bytes, "budget_bytes": rank.budget_bytes, "weights_bytes": weights}
    return found(
        cause,
        root,
        "high",
        what=f"it does not fit: {what}",
        fixes=fixes,
        evidence=_evidence(*lines),
        why=f"{format_bytes(fit.short_bytes)} are missing, counted before anything is loaded",
        numbers={name: float(value) for name, value in numbers.items()},
    )


def _would_refuse(
    command: ServerCommand, told: PlanAnswer, question: Question, engine: str, *, sizes_itself: bool
) -> Iterator[Finding]:
    """It fits as Holdfast counts, and the engine's own sizing or features stand against it. `sizes_itself`: its KV pool
    is not set in bytes."""
    from holdfast.planner.advice.remedy import with_settings
    from holdfast.planner.report.answer import answer

    for reason in told.lacks:
        sized = any(part in reason for part in _OF_SIZING)
        if sized and not sizes_itself:
            continue
        if sized:
            open_length = answer(with_settings(question, max_model_len=None), engine=engine)
            theirs = open_length.commands.get(command.engine)
            fixes = []
            if theirs is not None and theirs.max_model_len:
                changes: dict[str, str | None] = {"--max-model-len": str(theirs.max_model_len)}
                why = "the longest context that this version holds; planned: it fits"
                fixes.append(changed(command, changes, why, SHORTER, basis="planned"))
            yield found(
                "kv_cache_too_small_for_max_len",
                "kv_blowout",
                "medium",
                what=reason.removeprefix("it would refuse: "),
                why="as this version sizes its KV pool",
                evidence=_evidence(reason),
                fixes=fixes,
            )
        else:
            yield would_not_run(command, reason)


def _warned(command: ServerCommand, warning: PlanWarning) -> Finding:
    cause, root = _WARNED[warning.code]
    means, helps = (text.replace("`", "") for text in (codes()[warning.code].means, codes()[warning.code].helps))
    words = [] if warning.fix is None else warning.fix.split()
    flag = {"-tp": "--tensor-parallel-size"}.get(words[0], words[0]) if words else ""
    value = words[1] if len(words) == 2 or (len(words) > 2 and words[2] == "or") else None
    theirs = profile(command.engine).spelling(flag.lstrip("-")) if flag.startswith("--") else None
    if theirs is not None and value is not None:
        fix = changed(command, {theirs: value}, f"what helps: {helps}")
    else:
        fix = Fix(why=warning.fix or helps)
    return found(
        cause,
        root,
        "medium",
        what=warning.message,
        why=means,
        evidence=_evidence(f"{warning.code}: {warning.message}"),
        fixes=[fix],
    )
