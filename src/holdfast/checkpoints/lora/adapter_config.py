"""What a PEFT adapter_config.json says, as far as answers depend on it; what is not there is refused by name.

No pattern of a stranger is run: which modules were adapted is what the file of factors holds, and patterns of alpha are
taken when they are plain names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoints.bounded_files import parse_table, spell
from holdfast.errors import AdapterError, CheckpointError
from holdfast.units import shorten

NOT_THERE = "HF373"
MAX_ALPHA = 1e9
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each output by a norm of base weights and factors",
    "modules_to_save": "whole modules are replaced",
    "lora_bias": "its LoRA factors have biases",
    "target_parameters": "parameters that are not modules are adapted",
    "trainable_token_indices": "rows of the embedding are replaced",
    "layer_replication": "layers of the model are repeated",
    "alora_invocation_tokens": "it is active only after certain tokens",
    "use_qalora": "its inputs are pooled",
    "arrow_config": "adapters are selected per token",
    "corda_config": "it was trained with modified base weights",
}
"""Features of PEFT that are not there, and what they would mean. Unset, empty or false they are nothing."""
_HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "unsloth_fixed", "use_rslora",
))  # fmt: skip
"""What is read here, what the factors' shapes tell, and what mattered in training alone."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that change the base weights too: the factors alone do not say the rest."""
_PLAIN_PATTERN = re.compile(r"(?P<begin>\^?)(?P<name>\w+(?:(?:\\?\.)\w+)*)\$?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    rank: int
    lora_alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    alpha_pattern: tuple[tuple[str, bool, float], ...]
    """(module or end of it, whether it is all of it, alpha), the first that fits counting."""
    base: str

    def targets(self, module: str) -> bool:
        """Whether a module of the file may be there. A pattern was run when the adapter was made."""
        if isinstance(self.target_modules, str):
            return True
        return not self.target_modules or any(_ends(module, target) for target in self.target_modules)

    def alpha(self, module: str) -> float:
        for name, whole, alpha in self.alpha_pattern:
            if module == name or (not whole and _ends(module, name)):
                return alpha
        return self.lora_alpha


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def read_config(raw: bytes, where: str) -> AdapterConfig:
    try:
        table = parse_table(raw, where)
    except CheckpointError as error:
        raise AdapterError(error.message, code=NOT_THERE, found=error.found, field="lora_path") from error
    kind = table.get("peft_type")
    if kind != "LORA":
        raise _wrong("peft_type", kind, "LORA")
    _refuse(table)
    rank, alpha = table.get("r", 8), table.get("lora_alpha", 8)
    if type(rank) is not int or not 1 <= rank <= 1 << 16:
        raise _wrong("r", rank, "a whole number from 1")
    base = table.get("base_model_name_or_path")
    return AdapterConfig(
        rank=rank,
        lora_alpha=_alpha("lora_alpha", alpha),
        use_rslora=_flag(table, "use_rslora"),
        target_modules=_targets(table.get("target_modules")),
        alpha_pattern=_patterns(table.get("alpha_pattern") or {}),
        base=base if isinstance(base, str) else "",
    )


def _refuse(table: Mapping[str, Any]) -> None:
    for name, meaning in _REFUSED.items():
        if table.get(name) not in (None, False, [], {}, ""):
            raise _absent(f"{name}: {meaning}", table[name])
    if table.get("bias", "none") != "none":
        raise _absent("bias: the model's biases were also trained", table["bias"])
    unknown = [name for name in table if name not in _HARMLESS and name not in _REFUSED]
    for name in unknown:
        if table[name] not in (None, False, [], {}, ""):
            raise _absent(f"{shorten(str(name))}, which is unknown and may change the output", table[name])
    begun = table.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASE):
        raise _absent("init_lora_weights: the base weights were modified before training", begun)


def _absent(what: str, found: object) -> AdapterError:
    return AdapterError(
        f"the adapter needs an unsupported feature: {what}",
        code=NOT_THERE,
        needed="plain LoRA",
        found=spell(found),
        fix="merge it into the model with PEFT, and serve the merged model",
        field="lora_path",
    )


def _wrong(name: str, found: object, needed: str) -> AdapterError:
    return AdapterError(
        f"{name} of the adapter's config cannot be used",
        code=NOT_THERE,
        needed=needed,
        found=spell(found),
        field="lora_path",
    )


def _flag(table: Mapping[str, Any], name: str) -> bool:
    value = table.get(name) or False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _alpha(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise _wrong(name, value, "a number")
    return float(value)


def _targets(value: object) -> str | tuple[str, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _wrong("target_modules", value, "names of modules, all-linear, or a pattern")


def _patterns(value: object) -> tuple[tuple[str, bool, float], ...]:
    if not isinstance(value, dict):
        raise _wrong("alpha_pattern", value, "a table")
    found = []
    for pattern, alpha in value.items():
        plain = _PLAIN_PATTERN.fullmatch(pattern)
        if plain is None:
            raise _absent("alpha_pattern: a pattern that is not a plain name", shorten(pattern))
        name = plain["name"].replace("\\.", ".")
        found.append((name, bool(plain["begin"]), _alpha("alpha_pattern", alpha)))
    return tuple(found)
