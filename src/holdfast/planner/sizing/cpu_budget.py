"""What the budget leaves for KV at a given context length. Counts and compares; refuses nothing and chooses nothing.

    budget ─ front ─ framework ─ libraries ─ weights ─ scratch ─ activations ─ logits ─ buffers ─ grammars
           = left for pages and their books

The longer the context, the larger the buffers and the less is left, so the longest one that fits is found by halving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.footprint import cpu, lora
from holdfast.footprint.cpu import BOOK_BYTES, Limits
from holdfast.footprint.structured_output import forms_bytes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.planner.sizing.default_limits import ANY_LENGTH
from holdfast.units import GIB, MIB, counted

LEAST_TOKENS = 512
"""A shorter context is of use to nobody: it is neither served unasked nor advised."""

RAM_STEP_BYTES = 64 * MIB
"""Budgets are advised in whole steps of this."""

DEFAULT_KV_BYTES = 4 * GIB
"""RAM is shared with everything else on the machine, so the pool does not take all of it unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What is settled before anything is counted."""

    dtype: str
    kv_dtype: str
    expand_weights: bool
    compiled: bool
    """Products with what is kept as stored are computed by compiled kernels, in float32."""
    compiled_attention: bool
    copies_matrices: bool
    """torch's dense products copy their matrix first."""


@dataclass(frozen=True, slots=True)
class Pool:
    blocks: int
    """The null page included."""
    reason: str
    source: str
    cut: bool = False
    """It would be larger if more of the budget were left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBudget:
    spec: ModelSpec
    stored: Mapping[str, StoredTensor] | None = field(repr=False)
    config: EngineConfig
    choices: Choices
    budget_bytes: int
    front_bytes: int
    layout: KVLayout
    weights_bytes: int
    scratch_bytes: int
    staging_bytes: int
    """While loading, beside the weights: the largest tensor as it is stored, and a tile."""
    worth_tokens: int = ANY_LENGTH
    """A longer context is not worth limits as low as these, unless it is asked for."""

    @staticmethod
    def measure(
        spec: ModelSpec,
        stored: Mapping[str, StoredTensor] | None,
        config: EngineConfig,
        choices: Choices,
        *,
        budget_bytes: int,
        front_bytes: int,
        worth_tokens: int = ANY_LENGTH,
    ) -> CpuBudget:
        dtype, expand, compiled = choices.dtype, choices.expand_weights, choices.compiled
        weights = cpu.weights_bytes(spec, stored, dtype=dtype, expand=expand, compiled=compiled)
        scratch = cpu.scratch_bytes(spec, stored, _limits(config, 1), dtype=dtype, expand=expand, compiled=compiled)
        return CpuBudget(
            spec=spec,
            stored=stored,
            config=config,
            choices=choices,
            budget_bytes=budget_bytes,
            front_bytes=front_bytes,
            layout=cpu.kv_layout(spec, block_tokens=config.block_size, kv_dtype=choices.kv_dtype),
            weights_bytes=weights,
            scratch_bytes=scratch if choices.copies_matrices else 0,
            staging_bytes=cpu.staging_bytes(stored),
            worth_tokens=worth_tokens,
        )

    @property
    def loading_terms(self) -> dict[str, int]:
        """At the peak of loading, before any of the terms of a step."""
        terms = {
            "front": self.front_bytes,
            "framework": cpu.FRAMEWORK_BYTES,
            "libraries": cpu.LIBRARIES_BYTES,
            "weights": self.weights_bytes,
            "staging": self.staging_bytes,
        }
        return {name: size for name, size in terms.items() if size}

    @property
    def loading_bytes(self) -> int:
        return sum(self.loading_terms.values())

    @property
    def weights_dtype(self) -> str:
        """Of plain matrices as they lie in memory."""
        choices = self.choices
        return cpu.kept_dtype(
            self.spec, self.stored, dtype=choices.dtype, expand=choices.expand_weights, compiled=choices.compiled
        )

    @property
    def most(self) -> int:
        """The longest context that is wanted."""
        asked = self.config.max_model_len
        return min(self.spec.max_position, self.worth_tokens) if asked is None else asked

    @property
    def least(self) -> int:
        """The shortest that is an answer: the one that was asked for, or of some use; any where the pool was set."""
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return 1 if self.config.kv_cache_memory_bytes is not None else min(LEAST_TOKENS, self.spec.max_position)

    def limits(self, length: int) -> Limits:
        return _limits(self.config, length)

    def one_sequence(self, length: int) -> int:
        """Pages that a sequence of full length needs, and the null page."""
        return 1 + self.layout.peak_blocks(length, self.config.step_tokens)

    def terms(self, length: int) -> dict[str, int]:
        """All but the pool and its books."""
        limits, choices = self.limits(length), self.choices
        tokens = self._most_pool_tokens()
        structured = not self.config.skip_tokenizer_init
        terms = {
            "front": self.front_bytes,
            "framework": cpu.FRAMEWORK_BYTES,
            "libraries": cpu.LIBRARIES_BYTES,
            "weights": self.weights_bytes,
            "scratch": self.scratch_bytes,
            "activations": cpu.activations_bytes(
                self.spec,
                limits,
                dtype=choices.dtype,
                compiled_attention=choices.compiled_attention,
                compiled=choices.compiled,
            )
            + self._adapting_bytes(),
            "adapters": self._adapters_bytes(),
            "logits": cpu.logits_bytes(self.spec, limits, tokens),
            "buffers": cpu.buffers_bytes(self.layout, limits, pool_tokens=tokens),
            "grammars": forms_bytes(self.spec.vocab_size, limits.max_num_seqs) if structured else 0,
        }
        return {name: size for name, size in terms.items() if size}

    def _adapters_bytes(self) -> int:
        """Places and copies of LoRA adapters."""
        config, dtype = self.config, self.choices.dtype
        if not config.lora_places:
            return 0
        copies = lora.copy_rows(config.lora_copies, on_cpu=True)
        return lora.held_bytes(
            self.spec, dtype=dtype, places=config.lora_places, max_rank=config.lora_rank, copies=copies
        )

    def _adapting_bytes(self) -> int:
        """Of a step, beside what it takes without adapters."""
        config = self.config
        if not config.lora_places:
            return 0
        return lora.step_bytes(self.spec, config.step_tokens, dtype=self.choices.dtype, max_rank=config.lora_rank)

    def left(self, length: int) -> int:
        """Of the budget, for pages with their books; less than nothing when the model itself does not fit."""
        return self.budget_bytes - sum(self.terms(length).values())

    def pool(self, length: int) -> Pool:
        """As many pages as are asked for, or as are left and useful; possibly too few, or too many to fit."""
        page, config = self.layout.page_bytes, self.config
        if config.kv_cache_memory_bytes is not None:
            return Pool(config.kv_cache_memory_bytes // page, "as set", "set")
        room = max(0, self.left(length)) // (page + BOOK_BYTES)
        wanted, reason, cut = room, "all that is left of the budget", True
        default = max(DEFAULT_KV_BYTES // page, self.one_sequence(length))
        if config.ram is None and default < room:
            wanted, reason, cut = default, "the default; set --kv-cache-memory-bytes to change it", False
        if (most_useful := self._most_useful(length)) < wanted:
            wanted, reason, cut = most_useful, _no_more(config.sequences), False
        return Pool(wanted, reason, "planner", cut)

    def most_blocks(self, length: int) -> int:
        """More would not be taken of any budget, or be of use; nor can this one ever hold more."""
        page = self.layout.page_bytes
        most = min(self._most_useful(length), self.budget_bytes // page)
        if self.config.ram is None:
            most = min(most, max(DEFAULT_KV_BYTES // page, self.one_sequence(length)))
        return most

    def _most_useful(self, length: int) -> int:
        return 1 + self.layout.blocks_side_by_side(self.config.sequences, length, self.config.step_tokens)

    def pages(self, length: int, blocks: int = 0) -> int:
        """That the pool must have: for one sequence of full length, and for so many blocks of sequences side by side;
        the null page included."""
        return max(self.one_sequence(length), 1 + blocks)

    def fits(self, length: int, blocks: int = 0) -> bool:
        if self.loading_bytes > self.budget_bytes:
            return False
        pages = self.pool(length).blocks
        enough = pages >= self.pages(length, blocks)
        return enough and pages * (self.layout.page_bytes + BOOK_BYTES) <= self.left(length)

    def longest(self, most: int, *, least: int = 1, blocks: int = 0) -> int:
        """The longest context from `least` to `most` that fits beside so many blocks; 0: none does."""
        if self.fits(most, blocks):
            return most
        if least > most or not self.fits(least, blocks):
            return 0
        low, high = least, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(middle, blocks):
                low = middle
            else:
                high = middle - 1
        return low

    def short_bytes(self, length: int, blocks: int = 0) -> int:
        """What is lacking for loading, and for one sequence of this length beside so many blocks: of the budget, or of
        the pool where its size was set. Nothing or less: it fits."""
        page, pages, asked = self.layout.page_bytes, self.pages(length, blocks), self.config.kv_cache_memory_bytes
        short = max(self.loading_bytes - self.budget_bytes, pages * (page + BOOK_BYTES) - self.left(length))
        return short if asked is None else max(short, pages * page - asked // page * page)

    def _most_pool_tokens(self) -> int:
        """No pool will hold more: a bound that does not depend on the length."""
        most = self.budget_bytes
        if self.config.kv_cache_memory_bytes is not None:
            most = min(most, self.config.kv_cache_memory_bytes)
        elif self.config.ram is None:
            most = min(most, max(DEFAULT_KV_BYTES, self.one_sequence(self.spec.max_position) * self.layout.page_bytes))
        return most // self.layout.page_bytes * self.layout.block_tokens // len(self.layout.groups)


def _no_more(sequences: int) -> str:
    return f"{counted(sequences, 'sequence')} of full length {'needs' if sequences == 1 else 'need'} no more"


def _limits(config: EngineConfig, length: int) -> Limits:
    return Limits(
        max_model_len=length,
        max_num_seqs=config.sequences,
        max_num_batched_tokens=config.step_tokens,
    )
