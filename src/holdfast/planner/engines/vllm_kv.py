"""How a release of vLLM keeps KV, as its source at that release has it: which layers forget, whether latents stay
compressed, how many layers share a page, how it counts what the pool holds.

    windows   V0 and 0.8.0 to 0.8.2 keep every token in every layer; to 0.9.0 so where any layer forgets nothing;
              since 0.9.1 each kind of layer has groups of its own, filled up to equal size
    chunks    like windows since 0.10.0, but not from 0.10.1 to 0.13
    latents   since 0.7.1; before it every head's keys and values, padded to 256 elements (0.7.0: not padded)

How large the pool is, is in vllm_release.py; which flags a release has, in vllm_command.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from holdfast.engine_profiles.profile import profile, spelled_release
from holdfast.footprint.cpu import KV_ELEMENT_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.models import LayerSpec, ModelSpec
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.fit.search import Plan, Rank
from holdfast.planner.sizing.draft_cost import draft_token_bytes
from holdfast.planner.sizing.kv_cost import KVCost, kv_cost, rank_bytes

LATENT_METHODS = (None, "fp8")
"""Quantizations whose latents stay compressed since the first release that has latents; others came later."""
ALIGNED_BYTES = 256
PADDED_HEAD = 256
CAPPED = ("Gemma2ForCausalLM", "gemma2")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """On one rank."""

    cost: KVCost
    """What sequences take of its pool."""
    checked: KVCost
    """What it asks at the start whether the pool holds it; of some releases less than a sequence then takes."""
    kv_dtype: str
    most_tokens: int | None
    """It reads no longer sequences, whatever memory there is; None: as long as the model allows."""
    counts_sequences: bool
    printed_bytes: int
    """Of the pool for each token that it prints, where it does not count sequences."""
    reasons: tuple[str, ...]
    """What it does otherwise than the plan."""

    def printed_tokens(self, pool_bytes: int, sequence_tokens: int) -> int:
        """As it prints them at the start."""
        if self.counts_sequences or self.cost.fixed_bytes:
            return self.cost.tokens(pool_bytes, sequence_tokens)
        whole = replace(self.cost, growing_bytes=self.printed_bytes, windows=())
        return whole.held_tokens(pool_bytes, sequence_tokens)


def kept_kv(found: Plan, rank: Rank, vllm: Vllm) -> KeptKV:
    spec, settings = found.question.model.spec, found.question.settings
    stored = _stored(found, vllm)
    kept = _kept_layers(Same(spec), vllm, _method(spec), KV_ELEMENT_BYTES[found.dtype])
    layers = found.stage_layers[rank.stage]
    whole = kv_cost(
        kept,
        element_bytes=KV_ELEMENT_BYTES[stored],
        state_bytes=KV_ELEMENT_BYTES[found.dtype],
        tensor_parallel=found.tensor_parallel,
        layers=layers,
        block_tokens=settings.block_tokens,
        step_tokens=_in_flight(found, vllm) * found.limits.max_num_batched_tokens,
    )
    own = [kept.layers[index] for index in layers]
    size_of = partial(rank_bytes, kept, ranks=found.tensor_parallel, element_bytes=KV_ELEMENT_BYTES[stored])
    last = rank.stage == found.pipeline_parallel - 1
    drafted = partial(draft_token_bytes, found.question.model, element_bytes=KV_ELEMENT_BYTES[stored])
    more = drafted(tensor_parallel=found.tensor_parallel) if last else 0
    padded, printed = _in_groups(whole, Counter((layer.window, size_of(layer)) for layer in own), vllm)
    return KeptKV(
        cost=_and(padded, more),
        checked=_and(_checked(found, rank, padded, whole, layers, vllm), more),
        kv_dtype=stored,
        most_tokens=most_tokens(spec, vllm),
        counts_sequences=vllm.has("counts-sequences") and vllm.runner != "v0",
        printed_bytes=printed + more,
        reasons=tuple(_reasons(found, kept, stored, vllm, whole, padded)),
    )


def _and(cost: KVCost, more: int) -> KVCost:
    """With what a draft model keeps of each token."""
    return replace(cost, growing_bytes=cost.growing_bytes + more) if more else cost


def fp8_by_default(found: Plan, vllm: Vllm) -> bool:
    """Whether KV of this model is kept in FP8 unless it is told: of all but a few it is what is computed in."""
    if not any(layer.latent is not None and layer.latent.index_dim for layer in found.question.model.spec.layers):
        return False
    gpus = [rank.device.gpu for rank in found.ranks]
    newest = any(gpu is not None and (gpu.compute_capability or (0, 0))[0] == 12 for gpu in gpus)
    return vllm.has("index-kv-in-fp8") or (newest and vllm.has("index-kv-in-fp8-on-blackwell"))


def _stored(found: Plan, vllm: Vllm) -> str:
    left_to_it = found.question.settings.kv_cache_dtype == "auto"
    return "fp8" if left_to_it and fp8_by_default(found, vllm) else found.kv_dtype


def most_tokens(spec: ModelSpec, vllm: Vllm) -> int | None:
    """Gemma 2 was cut to its window while windows in only some layers were not known."""
    if spec.architecture not in CAPPED or vllm.has("windows-in-some-layers"):
        return None
    return min((layer.window for layer in spec.layers if layer.window is not None), default=None)


def expands_latents(spec: ModelSpec, vllm: Vllm) -> bool:
    if all(layer.latent is None for layer in spec.layers):
        return False
    of_any = vllm.has("latents-of-any-quantization")
    return not vllm.has("latents") or (not of_any and _method(spec) not in LATENT_METHODS)


def _method(spec: ModelSpec) -> str | None:
    return None if spec.quantization is None else spec.quantization.method


def _in_flight(found: Plan, vllm: Vllm) -> int:
    """Steps under way at once: one more than stages, as it schedules ahead; its first runner does so without stages."""
    stages = found.pipeline_parallel
    if not vllm.has("windows-hold-steps-in-flight"):
        return 1
    return stages + 1 if vllm.runner == "v2" or stages == 1 else stages


# What its layers remember


def _forgets(layer: LayerSpec, vllm: Vllm, alone: bool) -> bool:
    """Whether what leaves the layer's window is given back. `alone`: no layer remembers everything."""
    if vllm.runner == "v0":
        return False
    if layer.chunked:
        return vllm.has("chunked-attention") and not vllm.has("chunked-attention-kept")
    return vllm.has("windows-alone" if alone else "windows-mixed")


def _alone(spec: ModelSpec) -> bool:
    return all(layer.window is not None for layer in spec.layers if layer.kind in ("full", "window", "latent"))


@lru_cache(maxsize=64)
def _kept_layers(key: Same[ModelSpec], vllm: Vllm, method: str | None, compute_bytes: int) -> ModelSpec:
    """The model with its layers as this release remembers them; the same object where they are."""
    spec = key.held
    alone = _alone(spec)
    expanded = expands_latents(spec, vllm)
    layers = []
    for layer in spec.layers:
        if layer.window is not None and not _forgets(layer, vllm, alone):
            layer = replace(layer, window=None, chunked=False)
        if layer.latent is not None and expanded:
            head = spec.head_dim if vllm.has("heads-unpadded") else PADDED_HEAD
            layer = replace(layer, latent=None, kv_heads=spec.heads, head_dim=head)
        elif layer.latent is not None and vllm.has("latents-aligned"):
            filled = -layer.latent.elements % (ALIGNED_BYTES // compute_bytes)  # Up to whole lines of memory.
            layer = replace(layer, latent=replace(layer.latent, rank=layer.latent.rank + filled))
        layers.append(layer)
    return spec if tuple(layers) == spec.layers else replace(spec, layers=tuple(layers))


# How they share the pool


def _in_groups(whole: KVCost, kinds: Counter[tuple[int | None, int]], vllm: Vllm) -> tuple[KVCost, int]:
    """`kinds`: layers by window and bytes of a token. They are cut into groups of equal size, the last group of a kind
    is filled up, and a block is of one size in every group. With it the bytes of the pool for each token it prints."""
    kinds = Counter({kind: count for kind, count in kinds.items() if kind[1]})
    if not whole.windows or not whole.growing_bytes or whole.fixed_bytes:
        return whole, whole.growing_bytes + sum(size for _, size in whole.windows)
    least, most = min(kinds.values()), max(kinds.values())
    size_of_group = most if most < least * vllm.value("group-growth") else least
    growing, groups, windows = 0, 0, Counter[int]()
    for (window, size), count in kinds.items():
        needed = -(-count // size_of_group)
        groups += needed
        if window is None:
            growing += needed * size_of_group * size
        else:
            windows[window] += needed * size_of_group * size
    padded = replace(whole, growing_bytes=growing, windows=tuple(sorted(windows.items())))
    return padded, groups * size_of_group * max(size for _, size in kinds)


def _checked(found: Plan, rank: Rank, padded: KVCost, whole: KVCost, layers: Sequence[int], vllm: Vllm) -> KVCost:
    """To 0.9.0 it asked for the windows that its pool then did not let forget; to 0.13 without what fills groups up."""
    if vllm.runner == "v0" or not vllm.has("windows-alone") or vllm.has("checks-padding"):
        return padded
    if vllm.has("windows-mixed"):
        return whole
    spec = found.question.model.spec
    if any(layer.chunked for layer in spec.layers):
        return padded
    return kv_cost(
        spec,
        element_bytes=KV_ELEMENT_BYTES[found.kv_dtype],
        state_bytes=KV_ELEMENT_BYTES[found.dtype],
        tensor_parallel=found.tensor_parallel,
        layers=layers,
        block_tokens=whole.block_tokens,
        step_tokens=whole.step_tokens,
    )


# What is said of it


def _reasons(found: Plan, kept: ModelSpec, stored: str, vllm: Vllm, whole: KVCost, padded: KVCost) -> Iterator[str]:
    spec, name = found.question.model.spec, f"vLLM {vllm.release}"
    before, after = ([layer for layer in one.layers if layer.window is not None] for one in (spec, kept))
    if len(after) < len(before):
        feature = "windows-alone" if _alone(spec) else "windows-mixed"
        if before[0].chunked:
            feature = "chunked-attention-again" if vllm.has("chunked-attention") else "chunked-attention"
        yield (
            f"{'its V0 engine' if vllm.runner == 'v0' else name} keeps every token in all layers: blocks outside a"
            f" window are not freed (its V1 engine frees them since {_since(feature)})"
        )
    if expands_latents(spec, vllm):
        head = spec.head_dim if vllm.has("heads-unpadded") else PADDED_HEAD
        since = _since("latents-of-any-quantization" if vllm.has("latents") else "latents")
        cached = f"keys and values of {spec.heads} heads, {head} elements each (latents since {since})"
        yield f"{name} does not cache latents: {cached}"
    elif kept is not spec and any(layer.latent is not None for layer in kept.layers):
        yield f"{name} pads a token's latent to a multiple of {ALIGNED_BYTES} bytes"
    if whole.step_tokens > found.limits.max_num_batched_tokens and whole.windows:
        yield f"its sliding windows hold the tokens of all steps in flight: {whole.step_tokens:,}"
    if padded != whole:
        yield "its layer groups have one size, and the last of each kind is padded"
    if stored != found.kv_dtype:
        yield f"{name} stores KV of this model in FP8 by default (its fp8_ds_mla)"
    cap = most_tokens(spec, vllm)
    if cap is not None:
        cut = f"it cuts the context to the window, {cap:,} tokens (not since {_since('windows-in-some-layers')})"
        yield f"{name} does not support windows in only some layers: {cut}"


def _since(feature: str) -> str:
    return spelled_release(profile("vllm").feature(feature))
