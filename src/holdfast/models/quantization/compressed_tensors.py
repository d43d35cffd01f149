"""Configs of compressed-tensors, in groups, and of NVIDIA's ModelOpt, whose NVFP4 is stored alike, as one QuantSpec."""

from __future__ import annotations

from dataclasses import replace

from holdfast.models.fields import MAX_WIDTH, Fields
from holdfast.models.quantization.spec import QuantSpec
from holdfast.models.quantization.values import bits_of, block_of, modules_of
from holdfast.units import shorten

_NVFP4_GROUP = 16
_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
"""How it may be stored; mixed-precision says it of each group."""
_MAX_GROUPS = 256


def keys_and_values_alone(table: Fields) -> bool:
    """Whether nothing but the KV cache is quantized: llm-compressor writes such checkpoints too."""
    groups = table.table("config_groups")
    alone = (groups is None or not groups.values) and table.table("kv_cache_scheme") is not None
    return alone and not _otherwise_stored(table)


def compressed_tensors(table: Fields) -> QuantSpec:
    groups, otherwise = table.table("config_groups"), _otherwise_stored(table)
    if groups is None or not groups.values:
        found = f"nothing, for {' and '.join(otherwise)}" if otherwise else "nothing"
        raise table.wrong("config_groups", "at least one group", found)
    if len(groups.values) > _MAX_GROUPS:
        raise table.wrong("config_groups", f"at most {_MAX_GROUPS} groups", f"{len(groups.values)} groups")
    schemes = [_compressed_group(table, groups, name) for name in groups.values]
    first, *others = schemes
    unread = [*(word for scheme in schemes for word in scheme.lacking), *otherwise]
    return replace(
        first,
        not_converted=modules_of(table, "ignore"),
        others=tuple(others),
        lacking=tuple(dict.fromkeys(unread)),
        reach_field="" if others else first.reach_field,
    )


def _otherwise_stored(table: Fields) -> list[str]:
    """What of all weights is not as products have them, whether or not they are quantized."""
    found, sparsity = list[str](), table.table("sparsity_config")
    if sparsity is not None and sparsity.text("format", default="dense") != "dense":
        found.append(f"sparse weights ({shorten(sparsity.text('format'))})")
    if table.table("transform_config") is not None:
        found.append("rotated weights (transform_config)")
    return found


def _nvfp4(group: Fields) -> QuantSpec:
    """Floats of four bits, sixteen of which share a scale in FP8. To be planned: this engine does not read them."""
    return QuantSpec(
        method="nvfp4",
        bits=4,
        granularity="group",
        group_size=_NVFP4_GROUP,
        static_activations=group.table("input_activations") is not None,
        head_converted=True,
        targets=_targets(group),
        lacking=("weights in NVFP4",),
        reach_field="group_size",
    )


def modelopt(table: Fields) -> QuantSpec | None:
    """NVIDIA's ModelOpt, of which NVFP4 and FP8 are published; to be planned too. None: another of its kinds."""
    algorithm = table.text("quant_algo", default="").upper()
    found = QuantSpec(
        method="nvfp4",
        bits=4,
        group_size=_NVFP4_GROUP,
        static_activations=True,
        head_converted=True,
        not_converted=modules_of(table, "ignore") + modules_of(table, "exclude_modules"),
        lacking=("weights in NVFP4, of ModelOpt",),
        reach_field="quant_algo",
    )
    if algorithm == "FP8":
        plain = replace(found, method="fp8", bits=8, group_size=0, granularity="tensor", inputs="fp8")
        return replace(plain, lacking=("weights in FP8, of ModelOpt",))
    return found if algorithm == "NVFP4" else None


def _compressed_group(table: Fields, groups: Fields, name: str) -> QuantSpec:
    group = groups.table(name)
    weights = None if group is None else group.table("weights")
    if group is None or weights is None:
        raise table.wrong("config_groups", "a group with weights", groups.values)
    bits, kind = bits_of(weights, "num_bits", (4, 8)), weights.text("type", default="int")
    if kind == "float" and bits == 4 and weights.values.get("group_size") == _NVFP4_GROUP:
        return _nvfp4(group)
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise weights.wrong("type", "int, float with 8 bits, or NVFP4", f"{kind} with {bits} bits, such as MXFP4")
    strategy = weights.text("strategy", default="group" if weights.has("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise weights.wrong("strategy", "tensor, channel, group or block", strategy)
    if bits == 4 and strategy not in ("channel", "group"):
        raise weights.wrong("strategy", "channel or group with 4 bits", strategy)
    inputs = group.table("input_activations")
    found = QuantSpec(
        method="fp8" if kind == "float" else "int8" if bits == 8 else "int4",
        bits=bits,
        granularity=strategy,  # type: ignore[arg-type]
        group_size=weights.integer("group_size", low=1, high=MAX_WIDTH) if strategy == "group" else 0,
        block=block_of(weights, "block_structure") if strategy == "block" else (0, 0),
        symmetric=weights.boolean("symmetric", default=True),
        activation_order=strategy == "group" and _ordered(weights),
        head_converted=True,
        targets=_targets(group),
        reach_field={"group": "group_size", "block": "block_structure"}.get(strategy, "strategy"),
    )
    form = group.text("format", default=table.text("format", default=""))
    if found.method == "int8":
        found = replace(found, packed=form == "pack-quantized" or (not form and inputs is None))
    if form and form not in _FORMS:
        found = replace(found, lacking=(f"compressed-tensors in the format {shorten(form)}",))
    return found if inputs is None else _with_inputs(inputs, found)


def _ordered(weights: Fields) -> bool:
    """Whether a group for every input is stored; of "weight" and "static" groups stay runs of inputs."""
    said = weights.values.get("actorder")
    return said is True or (isinstance(said, str) and said.lower() in ("group", "dynamic"))


def _with_inputs(inputs: Fields, found: QuantSpec) -> QuantSpec:
    """Inputs are rounded to what the weights are, or the product is another one than this engine has."""
    bits, kind = inputs.integer("num_bits", high=64, default=8), inputs.text("type", default="int")
    dynamic = inputs.values.get("dynamic", False)
    symmetric = inputs.boolean("symmetric", default=True)
    alike = bits == 8 and {"int": "int8", "float": "fp8"}.get(kind) == found.method
    if not alike or not symmetric or dynamic not in (True, False):
        said = f"{kind}{bits}{'' if symmetric else ' with zero points'}"
        unread = f"inputs rounded to {shorten(said)} for weights in {found.method}"
        return replace(found, static_activations=dynamic is False, lacking=(*found.lacking, unread))
    strategy = inputs.text("strategy", default="group" if inputs.has("group_size") else "tensor")
    if strategy not in ("tensor", "token", "group"):
        unread = f"inputs with scales by {shorten(strategy)}"
        return replace(found, static_activations=not dynamic, lacking=(*found.lacking, unread))
    group = inputs.integer("group_size", high=MAX_WIDTH) if strategy == "group" else 0
    return replace(
        found,
        inputs="fp8" if kind == "float" else "int8",
        input_group=group,
        static_activations=not dynamic,
    )


def _targets(group: Fields) -> tuple[str, ...] | None:
    """None: of the class of all linear layers."""
    named = modules_of(group, "targets")
    return None if not named or "Linear" in named else named
