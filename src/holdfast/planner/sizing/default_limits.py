"""max_num_seqs and max_num_batched_tokens where the user set none: the defaults, or smaller ones from a ladder.

    rung 0      the defaults
    rung 1...   smaller, each used only for contexts up to its `worth_tokens`

The rung that gives the longest context is taken, each counted up to its `worth_tokens`; of equals the first. So the
context never shrinks when memory grows, though the limits change. Counts no bytes: the caller says what a rung holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.config.engine import CPU_SEQUENCES, CPU_STEP_TOKENS, GPU_SEQUENCES, GPU_STEP_TOKENS
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import Limits
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import Settings
from holdfast.units import MIB, counted

ANY_LENGTH = 1 << 62
RAM_STEP_BYTES = 64 * MIB
"""Budgets are advised in whole steps of this."""
BESIDE_S = 0.5
"""How long answers may wait for the prompts of a step."""
TORCH_FLOPS = 31e9
CORE_FLOPS = {
    "amx": 110e9,
    "avx512_vnni": 100e9,
    "avx512": 65e9,
    "avx_vnni": 45e9,
    "avx2": 45e9,
    "neon_dotprod": 31e9,
    "portable": TORCH_FLOPS,
}
"""What a core does a second with the layers in all of a prompt's work, by variant of the compiled kernels: so much was
seen of SmolLM2 and Qwen2.5-Coder-0.5B with prompts of 512 to 1,500 tokens (docs/measurements/performance.md) on Xeons
of three generations and a Neoverse-N1. AVX-VNNI was not measured; it does no less than AVX2. A table, not a measurement
at each start: beside other programs a server would start with other limits than yesterday's."""
BESIDE_ROUND, BESIDE_LEAST = 16, 16
"""Rows that products take as fast as many more."""


@dataclass(frozen=True, slots=True)
class LimitPreset:
    sequences: int
    step_tokens: int
    worth_tokens: int = ANY_LENGTH
    """For a longer context limits are not lowered this far."""

    def limits(self, max_model_len: int) -> Limits:
        return Limits(max_model_len=max_model_len, max_num_seqs=self.sequences, max_num_batched_tokens=self.step_tokens)


GPU_RUNGS = (
    LimitPreset(GPU_SEQUENCES, GPU_STEP_TOKENS),
    LimitPreset(64, 4096, 8192),
    LimitPreset(16, 2048, 4096),
    LimitPreset(8, 1024, 4096),
    LimitPreset(4, 512, 4096),
    LimitPreset(1, 256, 4096),
)
STREAMED_RUNGS = (
    LimitPreset(32, 2048),
    LimitPreset(8, 1024, 4096),
    LimitPreset(4, 512, 4096),
    LimitPreset(1, 256, 4096),
)
"""Beside layers that come to a GPU for every step: what a step takes is taken from layers that could stay, and with so
many tokens it computes for about as long as they take to come."""
CPU_RUNGS = (
    LimitPreset(CPU_SEQUENCES, CPU_STEP_TOKENS),
    LimitPreset(16, 256, 4096),
    LimitPreset(4, 128, 2048),
    LimitPreset(1, 64, 1024),
)


def check_step(sequences: int | None, step_tokens: int | None) -> None:
    """The scheduler would refuse it too, when everything is loaded."""
    if sequences and step_tokens and sequences > step_tokens:
        raise ConfigurationError(
            f"max_num_seqs is {sequences:,} and max_num_batched_tokens {step_tokens:,}: a step needs a token for every"
            " running sequence",
            needed=f"max_num_batched_tokens of at least {sequences:,}",
            found=f"{step_tokens:,}",
            fix=f"--max-num-batched-tokens {sequences}, or --max-num-seqs {step_tokens}, or leave one of them out",
            field="max_num_batched_tokens",
        )


def ladder(
    kind: str, *, sequences: int | None, step_tokens: int | None, least_tokens: int, streamed: bool = False
) -> tuple[LimitPreset, ...]:
    """What is set stays as it is; what is not leaves a token for every sequence in a step. `least_tokens`: the shortest
    context that is an answer, worth every rung. `streamed`: layers come for every step."""
    found: dict[tuple[int, int], LimitPreset] = {}
    for rung in CPU_RUNGS if kind != "gpu" else STREAMED_RUNGS if streamed else GPU_RUNGS:
        limits = (
            sequences or min(rung.sequences, step_tokens or rung.sequences),
            step_tokens or max(rung.step_tokens, sequences or 0),
        )
        found.setdefault(limits, LimitPreset(*limits, max(rung.worth_tokens, least_tokens)))
    return tuple(found.values())


def choose(rungs: Sequence[LimitPreset], held: Callable[[int], int], least_tokens: int) -> int:
    """Which rung, by `held`: the context that each of them gives, no longer than it is worth. Where none gives
    `least_tokens` it is the last: less than that cannot be lacking."""
    last = len(rungs) - 1
    if held(last) < least_tokens:
        return last
    best, chosen = held(0), 0
    for index, rung in enumerate(rungs[1:], 1):
        if rung.worth_tokens > best and (found := held(index)) > best:
            best, chosen = found, index
    return chosen


def decisions(
    rungs: Sequence[LimitPreset], chosen: int, settings: Settings, *, traffic: bool, fits: bool, context: int
) -> Iterator[Decision]:
    """Of limits that are not set. `traffic`: it sets the number of sequences, and the limits must leave room for it;
    otherwise for a context of that length."""
    first, rung = rungs[0], rungs[chosen]
    room = "the traffic" if traffic else f"a context of {counted(context, 'token')}"
    beside = " with layers or experts in RAM" if settings.offloads and first in STREAMED_RUNGS else ""
    default = (f"the default{beside}", "default")
    usual = ("the traffic's peak", "traffic") if traffic else default
    for name, given, most, size, (reason, source) in (
        ("max_num_seqs", settings.max_num_seqs, first.sequences, rung.sequences, usual),
        ("max_num_batched_tokens", settings.max_num_batched_tokens, first.step_tokens, rung.step_tokens, default),
    ):
        if given is not None:
            continue
        if size < most:
            reason, source = f"not even {size:,} would fit with {room}", "planner"
            if fits:
                reason = f"{most:,} do not fit with {room}; {size:,} {'does' if size == 1 else 'do'}"
        yield Decision(name, str(size) if name == "max_num_seqs" else f"{size:,}", reason, source, lowered=size < most)


def core_flops(kernel_features: Collection[str] | None) -> float:
    """Of a core with these features whose compiled kernels multiply the weights; None: torch does."""
    if kernel_features is None:
        return TORCH_FLOPS
    return CORE_FLOPS[next(name for name, needs in KERNEL_VARIANTS.items() if needs.issubset(kernel_features))]


def prompt_tokens_beside(prompt_parameters: int, machine_flops: float, step_tokens: int) -> int:
    """Of prompts, in a step on a CPU in which answers go on as well: what takes about BESIDE_S."""
    tokens = int(BESIDE_S * machine_flops / (2 * prompt_parameters))
    return min(step_tokens, max(BESIDE_LEAST, tokens // BESIDE_ROUND * BESIDE_ROUND))


def beside_decision(tokens: int, cores: int) -> Decision:
    reason = (
        f"prefill tokens in a step with decoding, which waits for it: about {BESIDE_S:g} s on {counted(cores, 'core')}"
    )
    return Decision("prompt_tokens", f"{tokens:,}", reason, "planner")


def length_decision(served: int, allowed: int, longest: int, *, fits: bool = True, streamed: bool = False) -> Decision:
    """Of a context that nobody set. `longest`: what memory holds with the lowest limits. `streamed`: more layers could
    make room for more."""
    reason = "the model's maximum; it fits in memory"
    if not fits:
        alone = f"a single sequence could have {longest:,}" if longest else "nothing is left for KV"
        reason = f"of the model's {allowed:,}; the request does not fit: {alone}"
    elif served < allowed:
        more = "; a longer one, set with --max-model-len, takes the room of weights that would stay" if streamed else ""
        more = more or f", and {longest:,} with lower limits: --max-model-len" * (longest > served)
        reason = f"the model allows {allowed:,}; memory holds {served:,}{more}"
    return Decision("max_model_len", f"{served:,}", reason, "planner", lowered=served < allowed)
