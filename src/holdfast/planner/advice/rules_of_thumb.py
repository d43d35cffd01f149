"""Common rules of thumb beside the exact figures, with the reason they differ. For display only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.planner.fit.search import Plan
from holdfast.planner.sizing.dtype import is_fp8
from holdfast.units import counted, format_bytes

OVERHEAD_RULE = 1.3
"""Add 30% to the weights for activations and KV."""
SIZING_GUIDE = ((8.5, 16), (14.5, 28), (35.0, 70), (72.0, 140))
"""(billions of parameters up to, decimal GB) for FP16 and 4,096 tokens, as such guides print it."""
GUIDE_TOKENS = 4096
CLOSE = 0.05
"""Within this share a rule is called right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    name: str
    rule: str
    rule_bytes: int
    exact_bytes: int
    verdict: str
    at_least: bool = False
    """It says how much to buy: too little is wrong, however near."""

    @property
    def right(self) -> bool:
        if self.at_least and self.rule_bytes < self.exact_bytes:
            return False
        return abs(self.rule_bytes - self.exact_bytes) <= CLOSE * self.exact_bytes


def rules_of_thumb(fit: Plan) -> tuple[Thumb, ...]:
    return (*_weights(fit), *_kv(fit), *_overhead(fit), *_guide(fit))


def bytes_a_parameter(fit: Plan) -> float:
    quantization = fit.question.model.spec.quantization
    if quantization is not None:
        return quantization.bits / 8
    return {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}[fit.weights_dtype]


def _weights(fit: Plan) -> Iterator[Thumb]:
    each, parameters = bytes_a_parameter(fit), fit.question.model.spec.parameters
    rule, exact = int(parameters * each), fit.weights_bytes
    if not exact or fit.question.model.format == "gguf":
        return
    if abs(rule - exact) <= CLOSE * exact:
        why = "right"
    elif each < 2 and exact > rule:
        why = "quantized matrices have scales and zero points, and embeddings and head stay unquantized"
    else:
        why = "stored bytes are counted, and not all tensors have that width"
    yield Thumb(
        name="weights",
        rule=f"{parameters / 1e9:.1f} billion parameters x {each:g} bytes",
        rule_bytes=rule,
        exact_bytes=exact,
        verdict=why,
    )


def _kv(fit: Plan) -> Iterator[Thumb]:
    spec, tokens = fit.question.model.spec, fit.required_tokens
    rule = tokens * len(spec.layers) * spec.hidden_size * 2 * 2
    exact = sum(rank.kv.sequence_bytes(tokens) for rank in fit.ranks)
    if not exact:
        return
    times = rule / exact
    if abs(times - 1) <= CLOSE:
        why = "right: every head has its own keys and values"
    else:
        why = f"{times:.1f} times too large: " if times > 1 else f"{1 / times:.1f} times too small: "
        why += _why_not_hidden(fit)
    yield Thumb(
        name="KV of one sequence",
        rule=f"{counted(tokens, 'token')} x layers x hidden size x 2 x 2 bytes",
        rule_bytes=rule,
        exact_bytes=exact,
        verdict=why,
    )


def _why_not_hidden(fit: Plan) -> str:
    spec = fit.question.model.spec
    kinds = {layer.kind for layer in spec.layers}
    if "latent" in kinds:
        return "it caches one compressed vector per token instead of keys and values"
    reasons = {
        f"{spec.kv_heads} KV heads serve {spec.heads} query heads": spec.kv_heads != spec.heads,
        "windowed layers stop growing": "window" in kinds,
        "some layers have no KV": kinds & {"state", "shared"},
        f"heads are {spec.head_dim} wide, not hidden size / heads": spec.heads * spec.head_dim != spec.hidden_size,
        f"KV is stored in {fit.kv_dtype}": is_fp8(fit.kv_dtype) or fit.kv_dtype == "float32",
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds) or "only whole blocks are used"


def _overhead(fit: Plan) -> Iterator[Thumb]:
    rule = int(fit.weights_bytes * OVERHEAD_RULE)
    exact = sum(sum(term.nbytes for term in rank.terms) for rank in fit.ranks)
    exact += sum(fit.needed_bytes(rank) for rank in fit.ranks)
    each = f"{fit.required_sequences} x {counted(fit.required_tokens, 'token')}"
    yield Thumb(
        name="everything",
        rule="weights + 30%",
        rule_bytes=rule,
        exact_bytes=exact,
        verdict=f"the overhead depends on sequences and context, not on the weights: for {each} it is"
        f" {format_bytes(exact - fit.weights_bytes)}",
    )


def _guide(fit: Plan) -> Iterator[Thumb]:
    """For plain 16-bit models only; it knows no others."""
    spec = fit.question.model.spec
    if bytes_a_parameter(fit) != 2 or fit.question.model.format == "gguf" or fit.question.machine.kind != "gpu":
        return
    size = next((gb for most, gb in SIZING_GUIDE if spec.parameters / 1e9 <= most), None)
    if size is None or spec.parameters < 6e9:
        return
    tokens = min(GUIDE_TOKENS, spec.max_position)
    exact = sum(sum(term.nbytes for term in rank.terms) + rank.kv.sequence_bytes(tokens) for rank in fit.ranks)
    left = size * 10**9 - exact
    verdict = (
        f"too small: {format_bytes(-left)} missing for one sequence of {counted(tokens, 'token')}"
        if left < 0
        else f"leaves {format_bytes(left)} for more sequences"
    )
    yield Thumb(
        name="sizing guide",
        rule=f"{size} GB for this size, FP16, {GUIDE_TOKENS:,} tokens",
        rule_bytes=size * 10**9,
        exact_bytes=exact,
        verdict=verdict,
        at_least=True,
    )
