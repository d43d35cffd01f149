"""What this engine would have on a CPU, and choose there: the one count of `serve` and of `holdfast plan`.

    dtype, products, how weights are kept ─► a room for each rung of limits ─► the rung that is taken

Refuses only settings that contradict each other; whether what is left is enough is for others to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import expands, weight_sizes
from holdfast.footprint.layouts import is_quantized
from holdfast.hardware import Processor
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.sizing.cpu_budget import LEAST_TOKENS, Choices, CpuBudget
from holdfast.planner.sizing.default_limits import LimitPreset, choose, ladder
from holdfast.planner.sizing.dtype import asked_type, check_type, cpu_type


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoices:
    spec: ModelSpec
    stored: Mapping[str, StoredTensor] | None = field(repr=False)
    """By canonical name; None: dummies."""
    config: EngineConfig
    processor: Processor
    compiled_kernels: bool
    budget_bytes: int
    front_bytes: int

    @property
    def least_tokens(self) -> int:
        """The shortest context that is an answer."""
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return 1 if self.config.kv_cache_memory_bytes is not None else min(LEAST_TOKENS, self.spec.max_position)

    @property
    def rungs(self) -> tuple[LimitPreset, ...]:
        config = self.config
        return ladder(
            "cpu",
            sequences=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            least_tokens=self.least_tokens,
        )

    def chosen(self) -> tuple[int, CpuBudget, list[Decision]]:
        """The number of the rung that is taken, the room there, and what was chosen on the way."""
        rungs = self.rungs
        rooms = cache(lambda index: self.room(rungs[index]))
        index = choose(rungs, lambda at: rooms(at)[0].longest(rooms(at)[0].most), self.least_tokens)
        return index, *rooms(index)

    def longest_tokens(self) -> int:
        """The longest context that memory holds, whatever was asked for: with the lowest limits that are not set."""
        rung = replace(self.rungs[-1], worth_tokens=self.spec.max_position)
        room, _ = replace(self, config=replace(self.config, max_model_len=None)).room(rung)
        return room.longest(self.spec.max_position)

    def room(self, rung: LimitPreset) -> tuple[CpuBudget, list[Decision]]:
        """Weights are not expanded at the cost of context: more memory must not hold less."""
        decisions: list[Decision] = []
        config = replace(self.config, max_num_seqs=rung.sequences, max_num_batched_tokens=rung.step_tokens)
        choices = _choices(
            self.spec, self.stored, config, self.processor, self.compiled_kernels, self.budget_bytes, decisions
        )
        room = self._room(config, choices, rung)
        quantized = any(decision.field == "weights" for decision in decisions)
        if room.weights_dtype != choices.dtype and not quantized:
            reason = f"kept as stored, which takes less memory: compiled kernels compute from them in {choices.dtype}"
            decisions.append(Decision("weights", room.weights_dtype, reason, "hardware"))
        if self.stored is None or not choices.expand_weights or config.expand_weights != "auto":
            return room, decisions
        kept = self._room(config, replace(choices, expand_weights=False), rung)
        if room.longest(room.most) >= kept.longest(room.most):
            return room, decisions
        sizes = weight_sizes(self.spec, self.stored, choices.dtype)
        said = Decision("weights", "quantized", f"expanded, they would leave less context: {sizes}", "planner")
        return kept, [said if decision.field == "weights" else decision for decision in decisions]

    def _room(self, config: EngineConfig, choices: Choices, rung: LimitPreset) -> CpuBudget:
        return CpuBudget.measure(
            self.spec,
            self.stored,
            config,
            choices,
            budget_bytes=self.budget_bytes,
            front_bytes=self.front_bytes,
            worth_tokens=rung.worth_tokens,
        )


def _choices(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    config: EngineConfig,
    processor: Processor,
    compiled_kernels: bool,
    budget: int,
    decisions: list[Decision],
) -> Choices:
    dtype = _dtype(config.dtype, spec, processor, decisions)
    compiled = compiled_kernels and dtype == "float32"
    fast_blocks = compiled and processor.fast_block_products
    return Choices(
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        expand_weights=_expand(spec, stored, dtype, fast_blocks, config, budget, decisions),
        compiled=compiled,
        compiled_attention=_compiled_attention(config, compiled, decisions),
        copies_matrices=processor.copies_matrices(dtype),
    )


def _dtype(asked: str, spec: ModelSpec, processor: Processor, decisions: list[Decision]) -> str:
    check_type(asked, spec)
    given = asked_type(asked)
    if given is not None:
        return given
    chosen = cpu_type(spec.stored_dtype, fast_bfloat16=processor.fast_bfloat16)
    decisions.append(Decision("dtype", chosen.value, chosen.reason, chosen.source))
    return chosen.value


def _expand(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    dtype: str,
    fast_blocks: bool,
    config: EngineConfig,
    budget: int,
    decisions: list[Decision],
) -> bool:
    if stored is None or not any(is_quantized(tensor.layout) for tensor in stored.values()):
        return config.expand_weights == "always"
    if config.expand_weights != "auto":
        expand = config.expand_weights == "always"
        reason = weight_sizes(spec, stored, dtype)
        decisions.append(Decision("weights", "expanded" if expand else "quantized", reason, "set"))
        return expand
    expand, reason = expands(spec, stored, dtype=dtype, fast_blocks=fast_blocks, budget_bytes=budget)
    decisions.append(Decision("weights", "expanded" if expand else "quantized", reason, "planner"))
    return expand


def _compiled_attention(config: EngineConfig, compiled: bool, decisions: list[Decision]) -> bool:
    if config.attention_backend == "auto":
        return compiled
    if config.attention_backend == "compiled" and not compiled:
        raise ConfigurationError(
            "attention_backend is compiled, but there are no compiled kernels for this dtype",
            code="HF112",
            needed="dtype float32 and kernels built at install (a C compiler)",
            fix="--attention-backend auto, or reinstall with a C compiler",
            field="attention_backend",
        )
    decisions.append(Decision("attention_backend", config.attention_backend, "as set", "set"))
    return config.attention_backend == "compiled"
