"""A command as a question to the planner: an engine's flags as the settings of a plan, with what the engine takes where
none are set. Answers nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.doctor.check_command.gpu_split import sglang_limits
from holdfast.doctor.check_command.layer_partition import with_own_cut
from holdfast.doctor.check_command.unplanned import draft_model, drafts_itself, quantization_of
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import QUANTIZED_NAME
from holdfast.engine_profiles.profile import profile
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.planner.fit.search import Question

_COUNTED = re.compile(r"x\d+$")
"""A name of GPUs that says how many; without it there are as many as the command needs."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandMachine:
    """Whose command it is; nothing set: this one."""

    gpu: str | None = None
    vram: str | None = None
    ram: str | None = None

    @property
    def named(self) -> bool:
        return self.gpu is not None or self.vram is not None


def question_for(command: ServerCommand, machine: CommandMachine, version: str | None) -> Question:
    from holdfast.planner.advice.remedy import with_settings
    from holdfast.planner.compat.vllm_release import parse_vllm
    from holdfast.planner.inputs.machine import NVME_LIMIT_BYTES

    given: dict[str, object] = {}
    for setting in profile(command.engine).planned:
        value = command.value(profile(command.engine).spelling(setting) or "")
        if value is not None and value.lower() not in ("auto", "-1"):
            given[setting.replace("-", "_")] = value
    # Every engine takes one GPU where nothing is said of more.
    given.setdefault("tensor_parallel_size", "1")
    given.setdefault("pipeline_parallel_size", "1")
    if command.has("enable-lora"):
        given["enable_lora"] = True
    elif command.engine != "holdfast":
        given.pop("max_lora_rank", None)
    if command.engine == "holdfast" and command.has("no-offload"):
        given["offload"] = False
    if command.engine == "holdfast" and command.has("cpu-moe"):
        given["cpu_moe"] = True
    if machine.named and "nvme_path" in given:
        # Its folder is on that machine, whose disk is not known: as large as was said.
        del given["nvme_path"]
        given.setdefault("nvme", NVME_LIMIT_BYTES)
    if command.engine in ("vllm", "holdfast"):
        switches = ("enable-expert-parallel", "enforce-eager")
        given |= {switch.replace("-", "_"): True for switch in switches if command.has(switch)}
    if command.engine == "vllm":
        given["language_model_only"] = _takes_no_images(command)
    if command.engine == "llama.cpp":
        given |= _llama_context(command)
    method = quantization_of(command, _is_quantized(command.model))
    if method is not None and command.engine in ("vllm", "sglang", "holdfast"):
        given["quantization"] = method
    given |= {name: value for name in ("gpu", "vram", "ram") if (value := getattr(machine, name)) is not None}
    copies = replicas(command)
    if copies > 1 and machine.gpu is not None and _COUNTED.search(machine.gpu) is None:
        each = [str(given.get(f"{kind}_parallel_size", "1")) for kind in ("tensor", "pipeline")]
        given["gpu"] = f"{machine.gpu}x{copies * math.prod(int(size) for size in each if size.isdecimal())}"
    model = (command.model or "").partition(":")[0] if command.has("hf-repo") else command.model
    question = _asked_or_stored(command, model or None, given)
    question = _with_draft(question, command)
    if command.engine == "vllm" and not command.has("max-model-len"):
        # vLLM takes the model's whole context where none is set, and refuses to start where KV does not hold it.
        question = with_settings(question, max_model_len=question.model.spec.max_position)
    if command.engine == "sglang":
        question = sglang_limits(command, question)
    on_gpu = question.machine.kind == "gpu"
    if command.engine == "vllm" and command.value("gpu-memory-utilization") is None and on_gpu:
        question = with_settings(question, utilization=parse_vllm(version or "").default_utilization)
    return with_own_cut(command, question)


def _asked_or_stored(command: ServerCommand, model: str | None, given: dict[str, object]) -> Question:
    """Of Holdfast's --quantization that is not true of a quantized model: the model as it is stored, with which
    `checkpoint_format` says what Holdfast itself would."""
    from holdfast.config.plan import PlanConfig
    from holdfast.planner.api import question_of
    from holdfast.planner.models.quantize import CANNOT_QUANTIZE

    try:
        return question_of(PlanConfig.from_arguments(model=model, **given))
    except HoldfastError as error:
        if error.code != CANNOT_QUANTIZE or command.engine != "holdfast":
            raise
        stored = {name: value for name, value in given.items() if name != "quantization"}
        question = question_of(PlanConfig.from_arguments(model=model, **stored))
        if question.model.spec.quantization is None and question.model.format != "gguf":
            raise
        return question


def _with_draft(question: Question, command: ServerCommand) -> Question:
    """With the model's own draft layers, or a draft model beside it; as it is where their shapes are not known, which
    `check.py` says."""
    from holdfast.config.plan import PlanConfig
    from holdfast.planner.models.speculation import with_speculation

    name = draft_model(command)
    if name is None and not drafts_itself(command):
        return question
    drafting = {"spec_method": "mtp"} if name is None else {"speculative_config": json.dumps({"model": name})}
    try:
        return replace(question, model=with_speculation(question.model, PlanConfig.from_arguments(**drafting))[0])
    except HoldfastError:
        return question


def without_draft(question: Question) -> Question:
    """As if no draft model were loaded beside the model."""
    from holdfast.planner.models.speculation import DRAFT_MODEL

    spec = question.model.spec
    alone = replace(spec, unsupported=tuple(one for one in spec.unsupported if one != DRAFT_MODEL))
    return replace(question, model=replace(question.model, spec=alone, draft=None))


def _takes_no_images(command: ServerCommand) -> bool:
    limits = (command.value("limit-mm-per-prompt") or "").replace(" ", "").replace('"', "")
    return command.has("language-model-only") or bool(re.search(r"\bimage[:=]0\b", limits))


def replicas(command: ServerCommand) -> int:
    written = command.value("data-parallel-size") or "1"
    return int(written) if written.isdecimal() and len(written) < _DIGITS else 1


def _is_quantized(model: str | None) -> bool:
    """By its entry in the catalogue, or its name."""
    from holdfast.models import catalogue

    entry = None if model is None else catalogue.lookup(model)
    return (entry is not None and entry.quantized) or QUANTIZED_NAME.search(model or "") is not None


def _llama_context(command: ServerCommand) -> dict[str, object]:
    """Its -c is shared by all slots."""
    context, slots = command.value("ctx-size"), command.value("parallel")
    if context is None or not context.isdecimal() or int(context) == 0:
        return {}
    number = int(slots) if slots is not None and slots.isdecimal() and int(slots) > 0 else 1
    return {"max_model_len": max(1, int(context) // number)}
