"""What a command says of a model's format, against what the model is stored in; and why an engine or a GPU does not
take a format, sorted by cause. Plans nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.doctor.build_finding import changed, found
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import QUANTIZED_NAME
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.planner.fit.search import Question

_FAMILIES = {
    "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq",
    "gptq": "gptq", "gptq_marlin": "gptq", "auto_gptq": "gptq", "marlin": "gptq",
}  # fmt: skip
"""Of `--quantization`, what names only how files are stored, and can make nothing so while loading."""
_MADE_INSTEAD = re.compile(r"--quantization (int4|fp8), which quantizes it to (\d bits)")
_SINCE = re.compile(r"\b(?:in vLLM )?since (\d+\.\d+(?:\.\d+)?)\b")
_ENGINES = ("vLLM needs", "SGLang needs", "Holdfast needs")


def stored_otherwise(command: ServerCommand, question: Question) -> Finding | None:
    """`--quantization awq` of a model that is no AWQ model: refused at the start, whatever fits."""
    if command.engine == "holdfast":
        return _holdfast_refuses(command, question)
    asked = _FAMILIES.get((command.value("quantization") or "").lower())
    if asked is None or command.engine not in ("vllm", "sglang") or question.model.format == "gguf":
        return None
    quantization = question.model.spec.quantization
    if quantization is None and QUANTIZED_NAME.search(command.model or ""):
        return None  # By its name it is stored otherwise than the catalogue knows.
    if quantization is not None and quantization.method == asked:
        return None
    stored = "is not quantized" if quantization is None else f"is stored as {quantization.method}"
    written = f"--quantization {command.value('quantization')}"
    fixes = [
        changed(command, {"--quantization": None}, "the engine reads from the model config how it is stored"),
        Fix(why=f"a copy of the model that was quantized so, under its own name (most end in -{asked.upper()})",
            price="a little accuracy"),
    ]  # fmt: skip
    return found(
        "bad_flag",
        "not_memory",
        "high",
        what=f"the command has {written}, but the model {stored}",
        why="the flag states how the files are stored and converts nothing: the engine refuses to start",
        evidence=[Evidence(line=written, source="command")],
        fixes=fixes,
    )


def _holdfast_refuses(command: ServerCommand, question: Question) -> Finding | None:
    """As Holdfast itself says it; names that it does not know are found with the flags."""
    from holdfast.config.parts.quantization import method
    from holdfast.planner.models.requested import requested

    written, model = command.value("quantization"), question.model
    stored = model.spec.quantization if model.made_as is None else None
    if stored is None and model.origin == "catalogue" and QUANTIZED_NAME.search(command.model or ""):
        return None  # By its name it is stored otherwise than the catalogue knows.
    try:
        asked = None if written is None else method("--quantization", written)
        requested(asked, stored, gguf=model.format == "gguf", name=command.model or model.name)
    except ConfigurationError as error:
        makes = _MADE_INSTEAD.match(error.fix or "")
        change = {"--quantization": None if makes is None else makes[1]}
        why = "the checkpoint says how it is stored" if makes is None else f"quantized to {makes[2]} while loading"
        return found(
            "bad_flag",
            "not_memory",
            "high",
            what=error.message,
            why="the flag states how the files are stored: Holdfast refuses to start",
            evidence=[Evidence(line=f"--quantization {written}", source="command")],
            fixes=[changed(command, change, why)],
        )
    return None


def would_not_run(command: ServerCommand, reason: str) -> Finding:
    """Why an engine would not run what fits: `reason` as the planner says it."""
    since = _SINCE.search(reason)
    fixes: list[Fix] = []
    if since is not None:
        package = "sglang" if command.engine == "sglang" else "vllm"
        fixes.append(Fix(command=f"pip install --upgrade '{package}>={since[1]}'", why="a release that supports it"))
    if reason.startswith(_ENGINES) or "is built for compute capability" in reason:
        cause = "kernel_image_missing"
    elif "needs compute capability" in reason:
        cause = "dtype_unsupported_gpu"
        if reason.startswith(("KV in ", "an FP8 KV cache ")):
            fixes.append(
                changed(
                    command,
                    {"--kv-cache-dtype": "auto"},
                    "KV in the model's own type",
                    "half the tokens in the same memory",
                )
            )
        else:
            fixes.append(
                Fix(
                    why="a copy in a format that this GPU runs: AWQ from compute capability 7.5 on, GPTQ from"
                    " 6.0, or 16 bit where it fits"
                )
            )
    else:
        cause = "arch_unsupported" if since is not None else "other"
    return found(
        cause,
        "not_memory",
        "medium",
        what=f"{command.engine} would not run it: {reason}",
        why="this release does not support it; the GPU is not the limit" if cause == "arch_unsupported" else reason,
        evidence=[Evidence(line=reason, source="plan")],
        fixes=fixes,
    )
