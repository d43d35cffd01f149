"""How a checkpoint says its weights are quantized: every spelling of quantization_config, turned into one QuantSpec.

Knows methods, bits and exceptions; not how bytes lie on disk or in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast.errors import CheckpointError
from holdfast.models.fields import MAX_WIDTH, Fields
from holdfast.models.unquantized_modules import Exceptions, UntamedPattern
from holdfast.units import shorten

Method = Literal["awq", "gptq", "fp8", "int8", "int4", "bitsandbytes", "mxfp4", "nvfp4"]
Granularity = Literal["tensor", "channel", "group", "block"]
Inputs = Literal["plain", "fp8", "int8"]
_NVFP4_GROUP = 16
_METHODS = ("awq", "gptq", "auto-round", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes", "mxfp4")
INSTEAD = (
    "use this model in AWQ, GPTQ, FP8, compressed-tensors W4A16 or W8A8, bitsandbytes NF4, as a GGUF file, or"
    " unquantized with --quantization int4 or fp8"
)
"""Of what this engine cannot read."""
_FORMS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
"""Of compressed-tensors: how it may be stored; mixed-precision says it of each group."""
_MAX_PATTERNS, _MAX_GROUPS = 65536, 256
_PLAIN_BITS = 16


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
    """False: zero points are stored beside the scales, and are not all the same."""
    zeros_less_one: bool = False
    """GPTQ's first format: the zero points are stored less one."""
    activation_order: bool = False
    """GPTQ's act-order: a group index for every input is stored, and groups are not runs of inputs."""
    packed: bool = False
    """int8: four codes lie in a word, as int4's eight do."""
    inputs: Inputs = "plain"
    """What a product's inputs are rounded to, by the definition of the format."""
    input_group: int = 0
    """Columns of an input that share a scale; 0: all of a row, or one is stored."""
    input_bound: float = 0.0
    """No input counts for more when a scale is chosen; 0: there is no bound."""
    input_powers: bool = False
    """Scales of inputs are powers of two; those of weights may be stored as exponents."""
    static_activations: bool = False
    """A scale for the activations is stored with every matrix."""
    double_quantization: bool = False
    """bitsandbytes: the scales are quantized themselves."""
    not_converted: tuple[str, ...] = ()
    """Modules that stay as they are: names, parts of names, or patterns that begin with re: or hold a *."""
    head_converted: bool = False
    targets: tuple[str, ...] | None = None
    """Modules that this takes: names or patterns, as above; None: all linear layers that nothing else takes."""
    others: tuple[QuantSpec, ...] = ()
    """Other ways in which modules of the same checkpoint are quantized; those with targets come first."""
    lacking: tuple[str, ...] = ()
    """What of it this engine cannot read, in words; planning needs none of that."""
    quant_method: str = field(default="", compare=False)
    """As the config writes it; empty: no config says it."""
    reach_field: str = field(default="group_size", compare=False)
    """What the config calls that which says how far a scale reaches; empty: it is not the same for all matrices."""
    _exceptions: Exceptions = field(init=False, repr=False, compare=False)
    _takes: Exceptions = field(init=False, repr=False, compare=False)
    _of_experts: dict[str, int | None] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Which of this and `others` it is: the plan that holds it travels to the engine process, which a ring cannot."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exceptions", Exceptions.read(self.not_converted))
        object.__setattr__(self, "_takes", Exceptions.read(self.targets or ()))

    def converts(self, hf_name: str, experts: int = 1) -> bool:
        """Whether the linear layer of this tensor's name is quantized; `experts` as in `scheme_of`."""
        return self.scheme_of(hf_name, experts) is not None

    def scheme_of(self, hf_name: str, experts: int = 1) -> QuantSpec | None:
        """How the linear layer of this tensor's name is quantized; None: it is left alone. `experts`: how many the
        name's {expert} stands for. Rules may name each: raises CheckpointError where they are not quantized alike."""
        if "{expert}" not in hf_name:
            return self._scheme(hf_name)
        if hf_name not in self._of_experts:
            found = self._scheme_of_all(hf_name, experts)
            every = (self, *self.others)
            self._of_experts[hf_name] = next((place for place, one in enumerate(every) if one is found), None)
        known = self._of_experts[hf_name]
        return None if known is None else (self, *self.others)[known]

    def _scheme_of_all(self, hf_name: str, experts: int) -> QuantSpec | None:
        first = self._scheme(hf_name.replace("{expert}", "0"))
        rules = (self._exceptions, *(scheme._takes for scheme in (self, *self.others)))
        if not any(rule.tells_numbers for rule in rules):
            return first
        for expert in range(1, experts):
            name = hf_name.replace("{expert}", str(expert))
            other = self._scheme(name)
            if other is not first and _itself(other) != _itself(first):
                raise CheckpointError(
                    "experts of one layer are quantized in different ways: this engine keeps them as one stack",
                    needed=f"{name.removesuffix('.weight')} {_in_words(first)}, as the layer's first expert",
                    found=f"{_in_words(other)}, as quantization_config says",
                    fix=INSTEAD,
                    field="quantization_config",
                )
        return first

    def _scheme(self, hf_name: str) -> QuantSpec | None:
        module = hf_name.rpartition(".")[0] if hf_name.endswith((".weight", ".bias")) else hf_name
        if hf_name.startswith(("lm_head.", "output.")) and not self.head_converted:
            return None
        if self._exceptions.hold(module):
            return None
        schemes = (self, *self.others)
        named = (scheme for scheme in schemes if scheme.targets is not None and scheme._takes.hold(module))
        return next(named, next((scheme for scheme in schemes if scheme.targets is None), None))


def _itself(scheme: QuantSpec | None) -> QuantSpec | None:
    """Without what says which modules it takes."""
    if scheme is None:
        return None
    return replace(scheme, not_converted=(), targets=None, others=(), head_converted=False, lacking=())


def _in_words(scheme: QuantSpec | None) -> str:
    return "unquantized" if scheme is None else f"in {scheme.method} of {scheme.bits} bits"


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
        return _compressed(table)
    if method == "bitsandbytes":
        return _bitsandbytes(table)
    if method == "mxfp4":
        return QuantSpec(method="mxfp4", bits=4, group_size=32, not_converted=_modules(table, "modules_to_not_convert"))
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
        bits=_bits(table, bits_name, (4,)),
        granularity="group" if group > 0 else "channel",
        group_size=max(group, 0),
        symmetric=not table.boolean("zero_point", default=True),
        not_converted=_modules(table, "modules_to_not_convert"),
        lacking=() if version == "gemm" else (f"AWQ in the {shorten(version)} layout",),
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
        not_converted=_modules(table, "modules_to_not_convert"),
    )
    if stored_as not in ("gptq", "gptq_v2") or packed_for_marlin:
        layout = "marlin" if packed_for_marlin else stored_as
        found = replace(found, lacking=(f"GPTQ in the {shorten(layout)} layout",))
    found = _gptq_scheme(table, found)
    rules = table.table("dynamic")
    return found if rules is None else _dynamic(table, rules, found)


def _gptq_scheme(table: Fields, base: QuantSpec) -> QuantSpec:
    """`base` with what the table says of bits and groups; what it does not say stays."""
    bits = _bits(table, "bits", (2, 3, 4, 8)) if table.has("bits") or base.group_size == 0 else base.bits
    group = table.integer("group_size", low=-1, high=MAX_WIDTH, default=base.group_size or 128)
    if group == 0:
        raise table.wrong("group_size", "a whole number from 1, or -1 for whole rows", group)
    ordered = table.boolean("desc_act", default=base.activation_order)
    # With static groups, columns are quantized in another order but keep their groups.
    ordered = ordered and group > 0 and not table.boolean("static_groups", default=False)
    unread = (f"GPTQ of {bits} bits",) if bits in (2, 3) else ()
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
        _read_patterns(table, "dynamic", (pattern,))
        if written.startswith("-:"):
            skipped.append(pattern)
            continue
        told = rules.table(written)
        if told is not None:
            schemes.append(replace(_gptq_scheme(told, base), targets=(pattern,)))
    _read_patterns(table, "dynamic", (*base.not_converted, *skipped))
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
        _read_patterns(table, "extra_config", patterns)
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
    skipped = _modules(table, "modules_to_not_convert") + _modules(table, "ignored_layers")
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
    block, scheme = _block(table, "weight_block_size"), table.text("activation_scheme", default="dynamic")
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


def _compressed(table: Fields) -> QuantSpec:
    groups = table.table("config_groups")
    if groups is None or not groups.values:
        raise table.wrong("config_groups", "at least one group", "nothing")
    if len(groups.values) > _MAX_GROUPS:
        raise table.wrong("config_groups", f"at most {_MAX_GROUPS} groups", f"{len(groups.values)} groups")
    schemes = [_compressed_group(table, groups, name) for name in groups.values]
    first, *others = schemes
    unread = [word for scheme in schemes for word in scheme.lacking]
    sparsity = table.table("sparsity_config")
    if sparsity is not None and sparsity.text("format", default="dense") != "dense":
        unread.append(f"sparse weights ({shorten(sparsity.text('format'))})")
    if table.table("transform_config") is not None:
        unread.append("rotated weights (transform_config)")
    return replace(
        first,
        not_converted=_modules(table, "ignore"),
        others=tuple(others),
        lacking=tuple(dict.fromkeys(unread)),
        reach_field="" if others else first.reach_field,
    )


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


def _compressed_group(table: Fields, groups: Fields, name: str) -> QuantSpec:
    group = groups.table(name)
    weights = None if group is None else group.table("weights")
    if group is None or weights is None:
        raise table.wrong("config_groups", "a group with weights", groups.values)
    bits, kind = _bits(weights, "num_bits", (4, 8)), weights.text("type", default="int")
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
        block=_block(weights, "block_structure") if strategy == "block" else (0, 0),
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
    named = _modules(group, "targets")
    return None if not named or "Linear" in named else named


def _bitsandbytes(table: Fields) -> QuantSpec:
    four, eight = table.boolean("load_in_4bit", default=False), table.boolean("load_in_8bit", default=False)
    if four == eight:
        raise table.wrong("load_in_4bit", "either load_in_4bit or load_in_8bit", "both" if four else "neither")
    skipped = _modules(table, "llm_int8_skip_modules")
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


def _bits(table: Fields, name: str, allowed: Iterable[int]) -> int:
    bits = table.integer(name, high=64)
    if bits not in allowed:
        raise table.wrong(name, " or ".join(str(known) for known in allowed), bits)
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
    _read_patterns(table, name, tuple(value))
    return tuple(value)


def _read_patterns(table: Fields, name: str, written: tuple[str, ...]) -> None:
    try:
        Exceptions.read(written)
    except UntamedPattern as error:
        needed = "patterns that can be read, few of them with repeats, and no repeat of a group"
        raise table.wrong(name, needed, f"{error} among {len(written)} entries") from error
