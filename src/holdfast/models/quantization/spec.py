"""How a checkpoint's weights are quantized, and which modules: one QuantSpec for every spelling of its config.

Knows methods, bits and exceptions; not how configs write them, nor how bytes lie on disk or in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.errors import CheckpointError
from holdfast.models.quantization.unquantized_modules import Exceptions

Method = Literal["awq", "gptq", "fp8", "int8", "int4", "bitsandbytes", "mxfp4", "nvfp4"]
Granularity = Literal["tensor", "channel", "group", "block"]
Inputs = Literal["plain", "fp8", "int8"]
INSTEAD = (
    "use this model in AWQ (gemm layout), GPTQ of 4 or 8 bits, FP8, compressed-tensors W4A16 or W8A8, bitsandbytes NF4,"
    " as a GGUF file, or unquantized with --quantization int4 or fp8; which are published:"
    " holdfast plan OWNER/NAME, of the unquantized model"
)
"""Of what this engine cannot read."""


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
        if all(rule.alike(_module(hf_name), experts) for rule in rules):
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
        module = _module(hf_name)
        if hf_name.startswith(("lm_head.", "output.")) and not self.head_converted:
            return None
        if self._exceptions.hold(module):
            return None
        if not self.others:
            return self if self.targets is None or self._takes.hold(module) else None
        schemes = (self, *self.others)
        named = (scheme for scheme in schemes if scheme.targets is not None and scheme._takes.hold(module))
        return next(named, next((scheme for scheme in schemes if scheme.targets is None), None))


def _module(hf_name: str) -> str:
    return hf_name.rpartition(".")[0] if hf_name.endswith((".weight", ".bias")) else hf_name


def _itself(scheme: QuantSpec | None) -> QuantSpec | None:
    """Without what says which modules it takes."""
    if scheme is None:
        return None
    return replace(scheme, not_converted=(), targets=None, others=(), head_converted=False, lacking=())


def _in_words(scheme: QuantSpec | None) -> str:
    return "unquantized" if scheme is None else f"in {scheme.method} of {scheme.bits} bits"
