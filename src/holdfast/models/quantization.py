"""How a checkpoint says its weights are quantized: every spelling of quantization_config, turned into one QuantSpec.

Knows methods, bits and exceptions; not how bytes lie on disk or in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.models.fields import MAX_WIDTH, Fields
from holdfast.models.unquantized_modules import Exceptions, UntamedPattern

Method = Literal["awq", "gptq", "fp8", "int8", "int4", "bitsandbytes", "mxfp4"]
Granularity = Literal["tensor", "channel", "group", "block"]
_METHODS = ("awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes", "mxfp4")
_MAX_PATTERNS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """The method names how weights are stored; int8 and int4 are those of compressed-tensors."""

    method: Method
    bits: int
    granularity: Granularity = "group"
    """Over what one scale reaches: all of a matrix, a row, `group_size` of a row, or a `block` of it."""
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True
    """False: zero points are stored beside the scales."""
    activation_order: bool = False
    """GPTQ's act-order: a group index for every input is stored."""
    static_activations: bool = False
    """A scale for the activations is stored with every matrix."""
    double_quantization: bool = False
    """bitsandbytes: the scales are quantized themselves."""
    not_converted: tuple[str, ...] = ()
    """Modules that stay as they are: names, parts of names, or patterns that begin with re: or hold a *."""
    head_converted: bool = False
    reach_field: str = field(default="group_size", compare=False)
    """What the config calls that which says how far a scale reaches; empty: it is not the same for all matrices."""
    _exceptions: Exceptions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exceptions", Exceptions.read(self.not_converted))

    def converts(self, hf_name: str) -> bool:
        """Whether the linear layer of this tensor's name is quantized."""
        module = hf_name.rpartition(".")[0] if hf_name.endswith((".weight", ".bias")) else hf_name
        if hf_name.startswith(("lm_head.", "output.")) and not self.head_converted:
            return False
        return not self._exceptions.hold(module)


def quantization_from_config(config: Fields) -> QuantSpec | None:
    """None: the weights are plain. An unknown method is refused by its name."""
    table = config.table("quantization_config") or config.table("compression_config")
    if table is None:
        return None
    default = "compressed-tensors" if table.has("config_groups") else ...
    method = table.text("quant_method", default=default)  # type: ignore[arg-type]
    if method == "awq":
        return _awq(table)
    if method == "gptq":
        return _gptq(table)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(table, method)
    if method == "compressed-tensors":
        return _compressed(table)
    if method == "bitsandbytes":
        return _bitsandbytes(table)
    if method == "mxfp4":
        return QuantSpec(method="mxfp4", bits=4, group_size=32, not_converted=_modules(table, "modules_to_not_convert"))
    raise config.wrong("quantization_config", "a quant_method of " + ", ".join(_METHODS), method)


def _awq(table: Fields) -> QuantSpec:
    bits_name = "bits" if table.has("bits") or not table.has("w_bit") else "w_bit"
    group_name = "group_size" if table.has("group_size") or not table.has("q_group_size") else "q_group_size"
    return QuantSpec(
        method="awq",
        bits=_bits(table, bits_name, (4,)),
        group_size=table.integer(group_name, low=1, high=MAX_WIDTH, default=128),
        symmetric=not table.boolean("zero_point", default=True),
        not_converted=_modules(table, "modules_to_not_convert"),
        reach_field=group_name,
    )


def _gptq(table: Fields) -> QuantSpec:
    group = table.integer("group_size", low=-1, high=MAX_WIDTH, default=128)
    return QuantSpec(
        method="gptq",
        bits=_bits(table, "bits", (2, 3, 4, 8)),
        granularity="group" if group > 0 else "channel",
        group_size=max(group, 0),
        # The format stores zero points even where they all mean the same.
        symmetric=False,
        activation_order=table.boolean("desc_act", default=False),
        head_converted=table.boolean("lm_head", default=False),
        not_converted=_modules(table, "modules_to_not_convert"),
        # Modules may have groups of their own.
        reach_field="" if table.has("dynamic") else "group_size",
    )


def _fp8(table: Fields, method: str) -> QuantSpec:
    skipped = _modules(table, "modules_to_not_convert") + _modules(table, "ignored_layers")
    if method == "fbgemm_fp8":
        return QuantSpec(method="fp8", bits=8, granularity="channel", not_converted=skipped, reach_field="quant_method")
    block = _block(table, "weight_block_size")
    return QuantSpec(
        method="fp8",
        bits=8,
        granularity="tensor" if block == (0, 0) else "block",
        block=block,
        static_activations=table.text("activation_scheme", default="dynamic") == "static",
        not_converted=skipped,
        reach_field="weight_block_size",
    )


def _compressed(table: Fields) -> QuantSpec:
    groups = table.table("config_groups")
    if groups is None or not groups.values:
        raise table.wrong("config_groups", "at least one group", "nothing")
    if len(groups.values) > 1:
        raise table.wrong("config_groups", "one group (several at once are not known)", f"{len(groups.values)} groups")
    group = groups.table(next(iter(groups.values)))
    weights = None if group is None else group.table("weights")
    if group is None or weights is None:
        raise table.wrong("config_groups", "a group with weights", groups.values)
    bits, kind = _bits(weights, "num_bits", (4, 8)), weights.text("type", default="int")
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise weights.wrong("type", "int, or float with 8 bits", kind)
    strategy = weights.text("strategy", default="group" if weights.has("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise weights.wrong("strategy", "tensor, channel, group or block", strategy)
    if bits == 4 and strategy not in ("channel", "group"):
        raise weights.wrong("strategy", "channel or group with 4 bits", strategy)
    inputs = group.table("input_activations")
    return QuantSpec(
        method="fp8" if kind == "float" else "int8" if bits == 8 else "int4",
        bits=bits,
        granularity=strategy,  # type: ignore[arg-type]
        group_size=weights.integer("group_size", low=1, high=MAX_WIDTH) if strategy == "group" else 0,
        block=_block(weights, "block_structure") if strategy == "block" else (0, 0),
        symmetric=weights.boolean("symmetric", default=True),
        activation_order=weights.text("actorder", default="") == "group",
        static_activations=inputs is not None and not inputs.boolean("dynamic", default=False),
        not_converted=_modules(table, "ignore"),
        head_converted=True,
        reach_field={"group": "group_size", "block": "block_structure"}.get(strategy, "strategy"),
    )


def _bitsandbytes(table: Fields) -> QuantSpec:
    four, eight = table.boolean("load_in_4bit", default=False), table.boolean("load_in_8bit", default=False)
    if four == eight:
        raise table.wrong("load_in_4bit", "either load_in_4bit or load_in_8bit", "both" if four else "neither")
    skipped = _modules(table, "llm_int8_skip_modules")
    if eight:
        return QuantSpec(method="bitsandbytes", bits=8, granularity="channel", not_converted=skipped)
    return QuantSpec(
        method="bitsandbytes",
        bits=4,
        group_size=64,
        double_quantization=table.boolean("bnb_4bit_use_double_quant", default=False),
        not_converted=skipped,
    )


def _bits(table: Fields, name: str, allowed: Iterable[int]) -> int:
    bits = table.integer(name, high=64)
    if bits not in allowed:
        raise table.wrong(name, "one of " + ", ".join(str(known) for known in allowed), bits)
    return bits


def _block(table: Fields, name: str) -> tuple[int, int]:
    value: Any = table.values.get(name)
    if value is None:
        return (0, 0)
    good = isinstance(value, list) and len(value) == 2
    if not good or any(
        isinstance(size, bool) or not isinstance(size, int) or not 0 < size < MAX_WIDTH for size in value
    ):
        raise table.wrong(name, "two sizes, rows and columns", value)
    return (value[0], value[1])


def _modules(table: Fields, name: str) -> tuple[str, ...]:
    value: Any = table.values.get(name)
    if value is None:
        return ()
    if isinstance(value, Mapping | str) or not isinstance(value, list) or len(value) > _MAX_PATTERNS:
        raise table.wrong(name, "a list of module names", value)
    if any(not isinstance(pattern, str) or len(pattern) > 1024 for pattern in value):
        raise table.wrong(name, "a list of module names", value)
    try:
        Exceptions.read(value)
    except UntamedPattern as error:
        needed = "patterns that can be read, few of them with repeats, and no repeat of a group"
        raise table.wrong(name, needed, f"{error} among {len(value)} entries") from error
    return tuple(value)
