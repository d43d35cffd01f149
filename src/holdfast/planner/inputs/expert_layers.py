"""Of which layers the experts wait in RAM, where that was asked for by hand: the first so many, or those whose tensors
match llama.cpp's patterns (--override-tensor).

A pattern is searched for in the names that tensors have in a GGUF file (blk.7.ffn_up_exps.weight) and in safetensors
(model.layers.7.mlp.experts.0.up_proj.weight), whichever the model comes in. The first that matches a tensor counts, and
CPU is the only place where one waits. What is not all experts of a layer is refused.
"""

from __future__ import annotations

import re

from holdfast.config.parts.offload import OffloadRequest
from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec, TensorSpec

NOT_EXPERTS = "HF137"
WAITS, STAYS = "CPU", "CUDA0"


def moe_layers(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(layer.index for layer in spec.layers if layer.experts is not None)


def expert_layers(asked: OffloadRequest, spec: ModelSpec) -> tuple[int, ...]:
    """By hand: the first so many, or those all of whose experts match. Of a model that something else was asked for, as
    far as it has such layers."""
    found = moe_layers(spec)
    if not asked.overrides:
        return tuple(layer for layer in found if layer < asked.expert_layers)
    waiting = {tensor.name for tensor in _waiting(asked, spec)}
    experts = [tensor for tensor in spec.tensors if tensor.experts]
    return tuple(layer for layer in found if all(tensor.name in waiting for tensor in experts if tensor.layer == layer))


def check_expert_layers(asked: OffloadRequest, spec: ModelSpec) -> None:
    """Refuses what is asked of a model without experts, and patterns for anything but all experts of layers."""
    found = moe_layers(spec)
    if not found:
        raise ConfigurationError(
            f"{asked.flag}: this model has no experts",
            code=NOT_EXPERTS,
            needed="a mixture of experts",
            found=spec.architecture,
            fix="leave it out; --gpu-layers keeps whole layers in RAM",
            field=_field(asked),
        )
    if not asked.overrides:
        return
    waiting = _waiting(asked, spec)
    for tensor in waiting:
        if not tensor.experts:
            needed = "a pattern of experts alone, such as exps=CPU"
            raise _refused(asked, f"{_names(tensor)[0]} is not an expert's", needed)
    names = {tensor.name for tensor in waiting}
    for first in waiting:
        others = (tensor for tensor in spec.tensors if tensor.layer == first.layer and tensor.experts)
        staying = next((tensor for tensor in others if tensor.name not in names), None)
        if staying is not None:
            said = f"{_names(first)[0]} would wait in RAM and {_names(staying)[0]} stay on the GPU"
            raise _refused(asked, said, "a pattern of all experts of a layer, such as ffn_.*_exps")
    if not waiting and any(_pattern(one)[1] == WAITS for one in asked.overrides):
        experts = next(tensor for tensor in spec.tensors if tensor.experts and tensor.layer == found[0])
        needed = f"a pattern that matches {_names(experts)[0]}"
        raise _refused(asked, "no tensor of an expert matches", needed)


def _waiting(asked: OffloadRequest, spec: ModelSpec) -> list[TensorSpec]:
    patterns = [_pattern(one) for one in asked.overrides]
    return [tensor for tensor in spec.tensors if _place(tensor, patterns) == WAITS]


def _place(tensor: TensorSpec, patterns: list[tuple[re.Pattern[str], str]]) -> str | None:
    """Of the first pattern that matches a name of it; None: it is as it would be."""
    return next((place for pattern, place in patterns if any(map(pattern.search, _names(tensor)))), None)


def _names(tensor: TensorSpec) -> list[str]:
    """In files; of experts that lie apart, the first one's."""
    return [name for name in (tensor.gguf_name, tensor.hf_name.replace("{expert}", "0")) if name]


def _pattern(written: str) -> tuple[re.Pattern[str], str]:
    pattern, _, place = written.rpartition("=")
    if not pattern or place.upper() not in (WAITS, STAYS):
        raise _unreadable(written, f"PATTERN={WAITS}, or PATTERN={STAYS} for what stays on the GPU")
    try:
        return re.compile(pattern), place.upper()
    except re.error as error:
        raise _unreadable(written, f"a regular expression ({error})") from None


def _unreadable(written: str, needed: str) -> ConfigurationError:
    return ConfigurationError(
        f"--override-tensor {written} is not understood",
        code=NOT_EXPERTS,
        needed=needed,
        found=written,
        fix="--override-tensor exps=CPU, or --n-cpu-moe N",
        field="override_tensor",
    )


def _refused(asked: OffloadRequest, found: str, needed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{asked.flag}: experts of whole layers wait in RAM, and nothing else",
        code=NOT_EXPERTS,
        needed=needed,
        found=found,
        fix=f"--n-cpu-moe N, or {needed}",
        field=_field(asked),
    )


def _field(asked: OffloadRequest) -> str:
    if asked.overrides:
        return "override_tensor"
    return "cpu_moe" if asked.flag == "--cpu-moe" else "n_cpu_moe"
