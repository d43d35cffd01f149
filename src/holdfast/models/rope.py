"""Rotary position settings: every spelling a checkpoint may use, turned into one RopeSpec. Computes no angles."""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import CheckpointError
from holdfast.models.fields import MAX_CONTEXT, MAX_HEAD_DIM, Fields
from holdfast.models.spec import RopeSpec

MAX_THETA = 1e12
MAX_FACTOR = 65536.0
_SCALINGS = ("none", "linear", "llama3", "yarn", "dynamic", "longrope", "mrope", "proportional")
_SPELLINGS = {"default": "none", "su": "longrope"}


def no_rope() -> RopeSpec:
    """Positions come into the model in another way."""
    return RopeSpec(theta=1.0, dim=0)


def rope_from_config(
    config: Fields, *, head_dim: int, max_position: int, partial: float = 1.0, theta: float = 10_000.0
) -> RopeSpec:
    """`rope_theta` with `rope_scaling`, or the newer `rope_parameters` that holds both.

    `partial`: the share of a head that the family rotates where its config does not say; `theta`: its base likewise.
    """
    newer, older = _of_full_layers(config.table("rope_parameters")), config.table("rope_scaling")
    if newer and older and _kind(newer) != _kind(older):
        raise config.wrong("rope_scaling", f"what rope_parameters says ({_kind(newer)})", _kind(older))
    table = newer or older or Fields({}, where=config.where)
    where_theta = table if table.has("rope_theta") else config
    base = where_theta.number("rope_theta", low=1.0, high=MAX_THETA, default=theta)
    where_partial = table if table.has("partial_rotary_factor") else config
    share = where_partial.number("partial_rotary_factor", low=0.0, high=1.0, default=partial)
    dim = int(head_dim * share)
    if _kind(table) == "longrope":
        return _long(table, config, theta=base, dim=dim, max_position=max_position)
    return _build(table, _kind(table), theta=base, dim=dim, max_position=max_position)


def rope_of_windows(config: Fields, *, dim: int, max_position: int, theta: float) -> RopeSpec:
    """Of layers with a window, in models that rotate those otherwise: a table of their own, or a base."""
    tables = config.table("rope_parameters")
    table = None if tables is None else tables.table("sliding_attention")
    if table is None:
        base = config.number("rope_local_base_freq", low=1.0, high=MAX_THETA, default=theta)
        return RopeSpec(theta=base, dim=dim)
    base = table.number("rope_theta", low=1.0, high=MAX_THETA, default=theta)
    return _build(table, _kind(table), theta=base, dim=dim, max_position=max_position)


def _long(table: Fields, config: Fields, *, theta: float, dim: int, max_position: int) -> RopeSpec:
    name = "original_max_position_embeddings"
    # Where both say it, transformers goes by what stands outside.
    original = (config if config.has(name) else table).integer(name, low=2, high=MAX_CONTEXT, default=max_position)
    factor = table.number("factor", low=1e-3, high=MAX_FACTOR, default=max_position / original)
    return RopeSpec(
        theta=theta,
        dim=dim,
        scaling="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=table.number("attention_factor", low=1e-3, high=1e3, default=long_magnitude(factor, original)),
        short_factors=table.numbers("short_factor", low=1e-3, high=MAX_FACTOR, most=MAX_HEAD_DIM),
        long_factors=table.numbers("long_factor", low=1e-3, high=MAX_FACTOR, most=MAX_HEAD_DIM),
    )


def long_magnitude(factor: float, original: int) -> float:
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def _of_full_layers(table: Fields | None) -> Fields | None:
    """Newer configs of models with windows hold one table for each kind of layer."""
    if table is None or not table.has("full_attention"):
        return table
    return table.table("full_attention")


def _kind(table: Fields) -> str:
    name = "rope_type" if table.has("rope_type") else "type"
    kind = table.text(name, default="default")
    return _SPELLINGS.get(kind, kind)


def _build(table: Fields, kind: str, *, theta: float, dim: int, max_position: int) -> RopeSpec:
    if kind == "none":
        return RopeSpec(theta=theta, dim=dim)
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{table.where}: rope scaling {kind!r} is not supported",
            needed="one of " + ", ".join(_SCALINGS),
            found=kind,
            field="rope_scaling",
        )
    needs_factor = kind in ("linear", "llama3", "yarn")
    factor = table.number("factor", low=1.0, high=MAX_FACTOR, default=... if needs_factor else 1.0)  # type: ignore[arg-type]
    more: dict[str, Any] = {}
    if kind == "llama3":
        more = {
            "low_freq_factor": table.number("low_freq_factor", low=1e-3, high=MAX_FACTOR),
            "high_freq_factor": table.number("high_freq_factor", low=1e-3, high=MAX_FACTOR),
            "original_max_position": table.integer("original_max_position_embeddings", high=MAX_CONTEXT),
        }
        # Equal ones, as Llama 4 Scout has them, leave no waves between to blend.
        if more["high_freq_factor"] < more["low_freq_factor"]:
            raise table.wrong("high_freq_factor", "not below low_freq_factor", more["high_freq_factor"])
    elif kind == "yarn":
        more = {
            "truncate": table.boolean("truncate", default=True),
            "original_max_position": table.integer(
                "original_max_position_embeddings", high=MAX_CONTEXT, default=max_position
            ),
            "beta_fast": table.number("beta_fast", low=1e-3, high=1e6, default=32.0),
            "beta_slow": table.number("beta_slow", low=1e-3, high=1e6, default=1.0),
            "attention_factor": _yarn_attention(table, factor),
        }
    return RopeSpec(theta=theta, dim=dim, scaling=kind, factor=factor, **more)  # type: ignore[arg-type]


def _yarn_attention(table: Fields, factor: float) -> float:
    given = table.number("attention_factor", low=1e-3, high=1e3, default=None)
    if given is not None:
        return given
    scale = table.number("mscale", low=0.0, high=1e3, default=0.0)
    scale_all = table.number("mscale_all_dim", low=0.0, high=1e3, default=0.0)
    if scale and scale_all:
        return yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def rope_from_gguf(header: Fields, *, head_dim: int, max_position: int, theta: float = 10_000.0) -> RopeSpec:
    """llama3's scaling is not here: GGUF carries it as the tensor rope_freqs.weight."""
    theta = header.number("rope.freq_base", low=1.0, high=MAX_THETA, default=theta)
    dim = header.integer("rope.dimension_count", low=0, high=head_dim, default=head_dim)
    kind = header.text("rope.scaling.type", default="none")
    factor_name = "rope.scaling.factor"
    if kind == "none" and header.has("rope.scale_linear"):  # the spelling before scaling had types
        kind, factor_name = "linear", "rope.scale_linear"
    if kind == "none":
        return RopeSpec(theta=theta, dim=dim)
    if kind == "longrope":
        return RopeSpec(theta=theta, dim=dim, scaling="longrope")
    if kind not in ("linear", "yarn"):
        raise header.wrong("rope.scaling.type", "none, linear, yarn or longrope", kind)
    factor = header.number(factor_name, low=1.0, high=MAX_FACTOR)
    if kind == "linear":
        return RopeSpec(theta=theta, dim=dim, scaling="linear", factor=factor)
    return RopeSpec(
        theta=theta,
        dim=dim,
        scaling="yarn",
        factor=factor,
        original_max_position=header.integer(
            "rope.scaling.original_context_length", high=MAX_CONTEXT, default=max_position
        ),
        beta_fast=header.number("rope.scaling.yarn_beta_fast", low=1e-3, high=1e6, default=32.0),
        beta_slow=header.number("rope.scaling.yarn_beta_slow", low=1e-3, high=1e6, default=1.0),
        attention_factor=yarn_magnitude(factor)
        * header.number("rope.scaling.attn_factor", low=1e-3, high=1e3, default=1.0),
    )


def longest_context(rope: RopeSpec, max_position: int) -> int:
    """What the scaling stretches the context to, as vLLM derives it; llama3 configs name the stretched one already."""
    if rope.scaling in ("linear", "dynamic"):
        return min(MAX_CONTEXT, int(max_position * rope.factor))
    if rope.scaling == "yarn":
        return min(MAX_CONTEXT, int(rope.original_max_position * rope.factor))
    return max_position
