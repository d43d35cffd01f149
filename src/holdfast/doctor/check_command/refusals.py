"""Commands that no plan can be made for, and why: a model that is not there, a split that is impossible; and vLLM on a
CPU, which cuts its memory by a variable of its own. Counts nothing that the planner counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.config.setting import flag_name
from holdfast.doctor.build_finding import changed, found
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.engine_profiles.profile import profile
from holdfast.errors import (
    CheckpointError,
    ConfigurationError,
    HoldfastError,
    ModelAccessError,
    ModelError,
    ModelNotFoundError,
)
from holdfast.units import GIB, format_bytes, parse_bytes, shorten

if TYPE_CHECKING:
    from holdfast.planner.fit.search import Question

HEADS, STAGES, TOO_FEW, NOT_TOGETHER, BEYOND_MODEL = "HF131", "HF132", "HF133", "HF134", "HF111"
NOT_ASKED = ("HF222", "HF223")
"""The hub was not reached, or is not to be asked."""
CPU_SPACE, LONG_ALLOWED = "VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
POOL = "kv-cache-memory-bytes"
CPU_BLOCK_TOKENS = 128
"""Of vLLM's KV on a CPU, and one block of its pool is for nobody (seen with 0.32: it refused a pool without)."""
ROOM_SHARE = 0.7
"""Of the free RAM that a larger pool may take: weights and steps need the rest."""
MOST_RANKS = 64
SHORTER = "longer requests are refused"
MACHINE_SETTINGS = ("gpu", "vram", "ram")
_LEAVE_OUT, _FLAG = re.compile(r"leave (.+?) out\b"), re.compile(r"--[a-z][a-z-]*")


def no_model(command: ServerCommand, error: ModelError, *, elsewhere: bool = False) -> tuple[list[Finding], list[str]]:
    """`elsewhere`: the command is for another machine, and so is a path in it."""
    missing = [f"the model: {error.message}" + (f" ({error.found})" if error.found else "")]
    if isinstance(error, CheckpointError) and command.engine == "holdfast":
        return [_unread(error)], []
    if not isinstance(error, ModelNotFoundError | ModelAccessError):
        return [], missing
    if error.code in NOT_ASKED:  # Whether it is there, and for whom, nobody has said.
        return [], [f"{missing[0]}" + (f"; {error.fix}" if error.fix else "")]
    name = shorten(command.model or "")
    local = name.startswith(("/", "./", "~"))
    if local and elsewhere:
        return [], [f"the model: {name} is a path of that machine; what it is decides whether it fits"]
    fix = error.fix if command.engine == "holdfast" else None
    return [
        found(
            "gated_or_missing_model",
            "not_memory",
            "high" if local else "low",
            what=f"there is no model at {name}" if local else f"{name} cannot be read from here",
            why=error.message,
            evidence=[Evidence(line=error.found or error.message, source="command")],
            fixes=[Fix(why=fix or "check the path, the name and HF_TOKEN")],
        )
    ], missing


def no_weights(command: ServerCommand, question: Question) -> Finding | None:
    """Of a folder of this machine: a config is enough for a plan, and not for a server."""
    from holdfast.models.runnable import require_runnable

    model = question.model.unquantized or question.model
    if model.origin != "folder" or model.format != "none" or command.value("load-format") == "dummy":
        return None
    if command.engine == "holdfast" and model.spec.quantization is not None and model.spec.quantization.lacking:
        try:
            require_runnable(model.spec, ())
        except CheckpointError as error:
            return _unread(error)  # Not a download that is refused then.
        except ModelError:
            pass
    pull = Fix(why="download the weights into it too: holdfast pull OWNER/NAME fetches every file")
    dummy = changed(command, {"--load-format": "dummy"}, "only to try settings", "random weights, so random answers")
    return found(
        "gated_or_missing_model",
        "not_memory",
        "high",
        what=f"{shorten(command.model or model.name)} has a config but no weight files",
        why=f"{profile(command.engine).name} refuses to start without them",
        evidence=[Evidence(line="*.safetensors files beside config.json: none", source="checkpoint")],
        fixes=[pull] if command.engine == "llama.cpp" else [pull, dummy],
    )


def _unread(error: CheckpointError) -> Finding:
    """By Holdfast's own reader: as serve would say it. Other engines may read what it does not."""
    known = (("needed", error.needed), ("found", error.found))
    return found(
        "other",
        "not_memory",
        "high",
        what=error.message,
        why="Holdfast does not read these files, and refuses to start",
        evidence=[Evidence(line=f"{name}: {said}", source="checkpoint") for name, said in known if said],
        fixes=[Fix(why=error.fix)] if error.fix else [],
    )


def refused(command: ServerCommand, error: HoldfastError, question: Question | None) -> tuple[list[Finding], list[str]]:
    """A plan that is impossible, whatever the memory."""
    evidence = [Evidence(line=f"{error.message} [{error.code}]", source="plan")]
    if error.code == HEADS and question is not None:
        return [_heads(command, error, question, evidence)], []
    if error.code in (TOO_FEW, NOT_TOGETHER, STAGES) and question is not None:
        devices = len(question.machine.devices)
        size = max((one for one in _sizes(question, devices) if one <= devices), default=1)
        fixes = [changed(command, _parallel(command, size), f"as many as are there: {devices}")]
        return [
            found(
                "tensor_parallel_mismatch",
                "not_memory",
                "high",
                what=error.message,
                why=error.found or "more ranks than GPUs",
                evidence=evidence,
                fixes=fixes,
            )
        ], []
    if error.code == BEYOND_MODEL and question is not None:
        most = question.model.spec.max_position
        flag = profile(command.engine).spelling("max-model-len") or "--max-model-len"
        fixes = [changed(command, {flag: str(most)}, "what the model was made for")]
        return [
            found(
                "bad_flag",
                "configuration_overshoot",
                "high",
                what=error.message,
                why="positions that the model never saw; engines refuse it unless rope scaling is configured",
                evidence=evidence,
                fixes=fixes,
            )
        ], []
    if isinstance(error, ConfigurationError) and command.engine == "holdfast" and not _of_the_machine(command, error):
        return [_as_serve_refuses(command, error, evidence)], []
    return [], [f"a plan: {error.message}" + (f"; {error.fix}" if error.fix else "")]


def _of_the_machine(command: ServerCommand, error: ConfigurationError) -> bool:
    """Of what the doctor was told beside the command."""
    return error.field in MACHINE_SETTINGS and not command.has(error.field)


def _as_serve_refuses(command: ServerCommand, error: ConfigurationError, evidence: list[Evidence]) -> Finding:
    """Settings that contradict each other or what is there: Holdfast's own refusal, before it loads anything."""
    flag = None if error.field is None else flag_name(error.field)
    fixes = [Fix(why=error.fix)] if error.fix else []
    named = _LEAVE_OUT.match(error.fix or "")
    left_out = [] if named is None else [flag] if named[1] == "it" else _FLAG.findall(named[1])
    if error.fix and flag is not None and command.has(flag) and flag in left_out:
        fixes = [changed(command, {flag: None}, error.fix)]
    return found(
        "bad_flag",
        "not_memory",
        "high",
        what=error.message,
        why="Holdfast refuses to start with these settings",
        evidence=evidence,
        fixes=fixes,
    )


def _heads(command: ServerCommand, error: HoldfastError, question: Question, evidence: list[Evidence]) -> Finding:
    sizes = _sizes(question, MOST_RANKS)
    asked = command.value("tensor-parallel-size") or "1"
    devices = len(question.machine.devices)
    size = max((one for one in sizes if one <= min(devices, int(asked))), default=1)
    shape = "head" not in error.message
    return found(
        "quant_shape_mismatch" if shape else "heads_not_divisible",
        "not_memory",
        "high",
        what=error.message,
        why=f"each GPU takes whole heads and groups of columns: it splits over {', '.join(map(str, sizes[:8]))}",
        evidence=evidence,
        fixes=[changed(command, _parallel(command, size), f"the largest for {devices} GPUs")],
    )


def _sizes(question: Question, most: int) -> tuple[int, ...]:
    from holdfast.footprint.identity_key import Same
    from holdfast.planner.fit.count import sizes

    return sizes(Same(question.model.spec), most)


def _parallel(command: ServerCommand, size: int) -> dict[str, str | None]:
    flag = profile(command.engine).spelling("tensor-parallel-size") or "--tensor-parallel-size"
    return {flag: str(size)}


# vLLM on a CPU


def vllm_on_a_cpu(command: ServerCommand, question: Question) -> Iterator[Finding]:
    """Its KV pool is what a variable says in GiB; where that is not set, a share that depends on the version."""
    from holdfast.footprint.cpu import KV_ELEMENT_BYTES
    from holdfast.planner.sizing.kv_cost import kv_cost

    size = command.value("tensor-parallel-size") or "1"
    if size.isdecimal() and int(size) > 1 and int(size) not in (able := _sizes(question, MOST_RANKS)):
        yield found(
            "heads_not_divisible",
            "not_memory",
            "high",
            what=f"the model's heads cannot be split over {size} ranks",
            why=f"it can be split over {', '.join(map(str, able[:8]))}",
            evidence=[Evidence(line=f"--tensor-parallel-size {size}", source="command")],
            fixes=[changed(command, _parallel(command, 1), "a CPU has no second device to split over")],
        )
    spec, length = question.model.spec, question.settings.max_model_len
    if length is not None and length > spec.max_position and command.environment.get(LONG_ALLOWED) != "1":
        yield found(
            "bad_flag",
            "configuration_overshoot",
            "high",
            what=f"max_model_len {length:,} is beyond the {spec.max_position:,} that the model was made for",
            why="vLLM refuses it unless rope scaling is configured",
            fixes=[
                changed(command, {"--max-model-len": str(spec.max_position)}, "what the model was made for", SHORTER)
            ],
        )
        return
    there = pool_bytes(command)
    if there is None or length is None:
        return
    dtype = "float32" if question.settings.dtype in ("float32", "float") else "bfloat16"
    element = KV_ELEMENT_BYTES[dtype]
    cost = kv_cost(spec, element_bytes=element, state_bytes=element)
    null = cost.sequence_bytes(CPU_BLOCK_TOKENS)
    needed = cost.sequence_bytes(length) + null
    if needed <= there:
        return
    longest = cost.longest(there - null, length) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
    shorter = changed(command, {"--max-model-len": str(longest)}, "the longest that the pool holds", SHORTER)
    more = _larger_pool(command, question, needed)
    yield found(
        "kv_cache_too_small_for_max_len",
        "kv_blowout",
        "high",
        what=f"one sequence of {length:,} tokens needs {format_bytes(needed)} of KV, and {format_bytes(there)} are set",
        why="vLLM refuses to start when its pool does not hold one sequence of max_model_len",
        evidence=[Evidence(line=f"max_model_len {length}, KV pool {format_bytes(there)}", source="command")],
        fixes=[shorter] if more is None else [more, shorter],
        numbers={"needed_bytes": float(needed), "available_bytes": float(there), "longest_tokens": float(longest)},
    )


def pool_bytes(command: ServerCommand) -> int | None:
    """Of vLLM on a CPU, where it is set; the variable outranks the flag."""
    space = command.environment.get(CPU_SPACE, "")
    if space.isdecimal() and int(space) > 0:
        return int(space) * GIB
    written = command.value(POOL)
    try:
        return None if written is None else parse_bytes(written)
    except HoldfastError:
        return None


def _larger_pool(command: ServerCommand, question: Question, needed: int) -> Fix | None:
    """Only where the RAM is there."""
    if needed > ROOM_SHARE * question.machine.devices[0].free_bytes:
        return None
    price = "as much more RAM is used"
    if CPU_SPACE in command.environment:
        return changed(command, {CPU_SPACE: str(-(-needed // GIB))}, "room for one whole sequence", price)
    return changed(command, {f"--{POOL}": str(needed)}, "room for one whole sequence", price)


_OLLAMA = re.compile(r"(?:^|\s)ollama (?:run|pull) (?:--?\S+ )*([\w./:-]+)")


def not_a_command(text: str) -> ConfigurationError:
    """Of what starts no server that is read here."""
    ollama = _OLLAMA.search(text)
    if ollama is not None:
        return ConfigurationError(
            "Ollama's commands have nothing to check: it chooses its settings itself",
            needed="a plan of the model, as Ollama stores it (Q4_K_M, unless its tag says otherwise)",
            found=shorten(text, 120),
            fix=f"holdfast plan {shlex.quote(ollama[1])} -q Q4_K_M --for llama.cpp",
            field="command",
        )
    return ConfigurationError(
        "this is not a command that starts a server",
        needed="vllm serve MODEL ..., python -m vllm.entrypoints.openai.api_server ..., llama-server ...,"
        " python -m sglang.launch_server ... or holdfast serve ...",
        found=shorten(text, 120),
        fix='holdfast doctor --command "vllm serve MODEL --max-model-len 8192"',
        field="command",
    )
