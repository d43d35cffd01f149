"""How a checkpoint says its weights are quantized: every spelling of quantization_config, turned into one QuantSpec.

Knows methods, bits and exceptions; not how bytes lie on disk or in memory.
"""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast.errors import CheckpointError
from holdfast.models.fields import MAX_WIDTH, Fields
from holdfast.models.quantization.compressed_tensors import compressed_tensors, keys_and_values_alone, modelopt
from holdfast.models.quantization.spec import INSTEAD, QuantSpec
from holdfast.models.quantization.values import bits_of, block_of, check_patterns, modules_of
from holdfast.units import shorten

_METHODS = ("awq", "gptq", "auto-round", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes", "mxfp4")
_PLAIN_BITS = 16


def quantization_from_config(config: Fields) -> QuantSpec | None:
    """None: the weights are plain. What is not read is refused by its name, with what is read."""
    try:
        return _from_config(config)
    except CheckpointError as error:
        error.fix = error.fix or INSTEAD
        raise


def _from_config(config: Fields) -> QuantSpec | None:
    table = config.table("quantization_config") or config.table("compression_config")
    if table is None:
        return None
    if not table.has("quant_method") and not table.has("config_groups"):
        raise table.missing("quant_method", "one of " + ", ".join(_METHODS))
    method = table.text("quant_method", default="compressed-tensors").lower()
    if method == "compressed-tensors" and keys_and_values_alone(table):
        return None
    return replace(_of_method(config, table, method), quant_method=method.replace("_", "-"))


def _of_method(config: Fields, table: Fields, method: str) -> QuantSpec:
    if method == "awq":
        return _awq(table)
    if method == "gptq":
        return _gptq(table)
    if method in ("auto-round", "auto_round"):
        return _auto_round(table)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(table, method)
    if method == "compressed-tensors":
        return compressed_tensors(table)
    if method == "bitsandbytes":
        return _bitsandbytes(table)
    if method == "modelopt" and (planned := modelopt(table)) is not None:
        return planned
    if method == "mxfp4":
        return QuantSpec(
            method="mxfp4", bits=4, group_size=32, not_converted=modules_of(table, "modules_to_not_convert")
        )
    raise config.wrong("quantization_config", "a quant_method of " + ", ".join(_METHODS), method)


def _awq(table: Fields) -> QuantSpec:
    bits_name = "bits" if table.has("bits") or not table.has("w_bit") else "w_bit"
    group_name = "group_size" if table.has("group_size") or not table.has("q_group_size") else "q_group_size"
    version = table.text("version", default="gemm").lower()
    group = table.integer(group_name, low=-1, high=MAX_WIDTH, default=128)
    if group == 0:
        raise table.wrong(group_name, "a whole number from 1, or -1 for whole rows", group)
    return QuantSpec(
        method="awq",
        bits=bits_of(table, bits_name, (4,)),
        granularity="group" if group > 0 else "channel",
        group_size=max(group, 0),
        symmetric=not table.boolean("zero_point", default=True),
        not_converted=modules_of(table, "modules_to_not_convert"),
        lacking=() if version == "gemm" else (f"AWQ in the {shorten(version)} layout (the gemm layout is read)",),
        reach_field=group_name,
    )


def _gptq(table: Fields) -> QuantSpec:
    stored_as = table.text("checkpoint_format", default=table.text("format", default="gptq"))
    packed_for_marlin = table.boolean("is_marlin_format", default=False)
    found = QuantSpec(
        method="gptq",
        bits=4,
        zeros_less_one=stored_as != "gptq_v2",
        head_converted=table.boolean("lm_head", default=False),
        not_converted=modules_of(table, "modules_to_not_convert"),
    )
    if stored_as not in ("gptq", "gptq_v2") or packed_for_marlin:
        layout = "marlin" if packed_for_marlin else stored_as
        found = replace(found, lacking=(f"GPTQ in the {shorten(layout)} layout",))
    found = _gptq_scheme(table, found)
    rules = table.table("dynamic")
    return found if rules is None else _dynamic(table, rules, found)


def _gptq_scheme(table: Fields, base: QuantSpec) -> QuantSpec:
    """`base` with what the table says of bits and groups; what it does not say stays."""
    bits = bits_of(table, "bits", (2, 3, 4, 8)) if table.has("bits") or base.group_size == 0 else base.bits
    group = table.integer("group_size", low=-1, high=MAX_WIDTH, default=base.group_size or 128)
    if group == 0:
        raise table.wrong("group_size", "a whole number from 1, or -1 for whole rows", group)
    ordered = table.boolean("desc_act", default=base.activation_order)
    # With static groups, columns are quantized in another order but keep their groups.
    ordered = ordered and group > 0 and not table.boolean("static_groups", default=False)
    unread = (f"GPTQ of {bits} bits (4 and 8 bits are read)",) if bits in (2, 3) else ()
    return replace(
        base,
        bits=bits,
        granularity="group" if group > 0 else "channel",
        group_size=max(group, 0),
        # The format stores zero points in any case; without this word they may differ.
        symmetric=table.boolean("sym", default=base.symmetric if base.group_size else False),
        activation_order=ordered,
        lacking=tuple(dict.fromkeys((*base.lacking, *unread))),
    )


def _dynamic(table: Fields, rules: Fields, base: QuantSpec) -> QuantSpec:
    """Of GPTQModel: patterns of modules that are quantized in another way ("+:") or not at all ("-:")."""
    skipped: list[str] = []
    schemes: list[QuantSpec] = []
    for written in rules.values:
        pattern = "re:" + written.removeprefix("+:").removeprefix("-:")
        check_patterns(table, "dynamic", (pattern,))
        if written.startswith("-:"):
            skipped.append(pattern)
            continue
        told = rules.table(written)
        if told is not None:
            schemes.append(replace(_gptq_scheme(told, base), targets=(pattern,)))
    check_patterns(table, "dynamic", (*base.not_converted, *skipped))
    unread = tuple(dict.fromkeys(word for scheme in (base, *schemes) for word in scheme.lacking))
    return replace(
        base,
        not_converted=(*base.not_converted, *skipped),
        others=tuple(schemes),
        lacking=unread,
        reach_field="" if schemes else base.reach_field,
    )


def _auto_round(table: Fields) -> QuantSpec:
    """AutoRound packs as GPTQ or AWQ do. Which blocks it left alone besides, the weights themselves tell."""
    packing, kind = table.text("packing_format", default="auto_round:auto_gptq"), table.text("data_type", default="int")
    layout = packing.removeprefix("auto_round:")
    if layout not in ("auto_gptq", "auto_awq") or kind != "int":
        needed = "auto_round:auto_gptq or auto_round:auto_awq, with whole numbers (data_type int)"
        raise table.wrong("packing_format", needed, f"{shorten(packing)} with data_type {shorten(kind)}")
    awq = layout == "auto_awq"
    base = _gptq_scheme(table, QuantSpec(method="awq" if awq else "gptq", bits=4, zeros_less_one=not awq))
    extra = table.table("extra_config")
    found = base if extra is None else _extra_config(table, extra, base)
    if awq and any(scheme.bits != 4 for scheme in (found, *found.others)):
        found = replace(found, lacking=("AWQ of other than 4 bits",))
    return found


def _extra_config(table: Fields, extra: Fields, base: QuantSpec) -> QuantSpec:
    """Of AutoRound: modules that have other bits, 16 where they are plain."""
    skipped: list[str] = []
    others: dict[QuantSpec, tuple[str, ...]] = {}
    for written in extra.values:
        told = extra.table(written)
        # As in vLLM: a name, or a pattern that is searched for.
        module = written if re.fullmatch(r"[\w.-]+", written) else f"re:.*{written}"
        if told is None:
            continue
        if told.integer("bits", high=64, default=base.bits) >= _PLAIN_BITS:
            skipped.append(module)
        else:
            scheme = _gptq_scheme(told, base)
            others[scheme] = (*others.get(scheme, ()), module)
    named = [replace(scheme, targets=modules) for scheme, modules in others.items()]
    for patterns in (tuple(skipped), *others.values()):
        check_patterns(table, "extra_config", patterns)
    unread = [word for scheme in (base, *named) for word in scheme.lacking]
    return replace(
        base,
        head_converted=any("lm_head" in modules for modules in others.values()),
        not_converted=tuple(skipped),
        others=tuple(named),
        lacking=tuple(dict.fromkeys(unread)),
        reach_field="" if named else base.reach_field,
    )


def _fp8(table: Fields, method: str) -> QuantSpec:
    skipped = modules_of(table, "modules_to_not_convert") + modules_of(table, "ignored_layers")
    if method == "fbgemm_fp8":
        # transformers' own default; null: without one.
        bounded = "activation_scale_ub" not in table.values or table.values["activation_scale_ub"] is not None
        return QuantSpec(
            method="fp8",
            bits=8,
            granularity="channel",
            inputs="fp8",
            not_converted=skipped,
            input_bound=table.number("activation_scale_ub", low=1e-3, high=1e30, default=1200.0) if bounded else 0.0,
            reach_field="quant_method",
        )
    block, scheme = block_of(table, "weight_block_size"), table.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise table.wrong("activation_scheme", "dynamic or static", scheme)
    # DeepSeek's ue8m0: scales of 128 inputs are powers of two, the next above largest / 448; weights' may be exponents.
    stored_as = table.text("scale_fmt", default="float") if table.values.get("scale_fmt") is not None else "float"
    if stored_as not in ("float", "ue8m0"):
        raise table.wrong("scale_fmt", "float or ue8m0", stored_as)
    lacking = ["experts in FP4 (expert_dtype)"] if table.values.get("expert_dtype") == "fp4" else []
    if stored_as == "ue8m0" and block == (0, 0) and scheme == "dynamic":
        lacking.append("scales of whole rows of inputs in powers of two (scale_fmt without weight_block_size)")
    return QuantSpec(
        method="fp8",
        bits=8,
        granularity="tensor" if block == (0, 0) else "block",
        block=block,
        inputs="fp8",
        input_group=block[1] if scheme == "dynamic" else 0,
        static_activations=scheme == "static",
        not_converted=skipped,
        input_powers=stored_as == "ue8m0" and block != (0, 0),
        lacking=tuple(lacking),
        reach_field="weight_block_size",
    )


def _bitsandbytes(table: Fields) -> QuantSpec:
    four, eight = table.boolean("load_in_4bit", default=False), table.boolean("load_in_8bit", default=False)
    if four == eight:
        raise table.wrong("load_in_4bit", "either load_in_4bit or load_in_8bit", "both" if four else "neither")
    skipped = modules_of(table, "llm_int8_skip_modules")
    if eight:
        return QuantSpec(method="bitsandbytes", bits=8, granularity="channel", not_converted=skipped)
    kind = table.text("bnb_4bit_quant_type", default="nf4")
    return QuantSpec(
        method="bitsandbytes",
        bits=4,
        group_size=64,
        double_quantization=table.boolean("bnb_4bit_use_double_quant", default=False),
        not_converted=skipped,
        lacking=() if kind == "nf4" else (f"{shorten(kind).upper()} of bitsandbytes",),
    )
