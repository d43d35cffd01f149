"""What memory was planned and what was measured, as an engine that is ready says it. Plain numbers; nothing is read."""

from __future__ import annotations

import msgspec


class MemoryTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One named part of the bytes a server holds."""

    tier: str
    """ram on a CPU."""
    term: str
    planned_bytes: int
    measured_bytes: int | None = None
    """None: not measured yet."""


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of one direction of the link between RAM and a GPU, over which weights and KV pages come, and KV pages go, or of
    the disk that weights are read from (nvme-ram); all of it only grows."""

    link: str = "ram-vram"
    copied_bytes: int = 0
    busy_s: float = 0.0
    """That copies, or reads, took."""
    stalled_s: float = 0.0
    """That the GPU waited for them; of a disk, that a step did."""
    over_s: float = 0.0
    """From the start to the last step, with the time in between in which nobody asked."""
    possible_bytes_per_s: float = 0.0
    """As it was measured at the start, with nothing else to do; 0: it was not."""


class ExpertUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of experts over VRAM and RAM, in steps with few tokens; all of it only grows. In steps with many, all experts
    that wait in RAM are copied to the GPU, whichever are used, and counted as bytes of the link."""

    pairs: int = 0
    """Of a token and an expert that it chose, in layers whose experts do not all stay in VRAM."""
    hits: int = 0
    """Of these, whose expert was in VRAM."""
    host_pairs: int = 0
    """That the host's cores computed; the GPU read what is in neither over the link."""
    host_s: float = 0.0
    """That they computed."""
    swaps: int = 0
    """Experts that came to VRAM in the place of others, which were used less."""


class KVTierUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of KV pages below the pool; what ends in _total only grows."""

    tier: str
    """ram or disk."""
    hit_tokens_total: int = 0
    """Of prompts, that came from there instead of being computed."""
    loaded_bytes_total: int = 0
    stored_bytes_total: int = 0
    held_bytes: int = 0
    total_bytes: int = 0
    """Of a store on disk what all processes hold there, which /memory alone says: see KVStoreUse."""


class KVStoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of the store of KV pages on disk, with all processes that share it."""

    held_bytes: int = 0
    total_bytes: int = 0
    written_today_bytes: int = 0
    dropped_writes_total: int = 0
    dropped_by_reason: dict[str, int] = {}
    """Their sum is that number."""
    missed_by_reason: dict[str, int] = {}
    """Pages that were asked for and not read."""
    waited_s_by_use: dict[str, float] = {}
    """That pages which are read, or written, waited for their turn on a disk that layers come from too; of several at
    once, all of it."""
    failing: bool = False


class LowerTier(msgspec.Struct, frozen=True, kw_only=True):
    """One that holds what does not fit above it."""

    tier: str
    total_bytes: int
    free_bytes: int
    limited_by: str
    terms: list[MemoryTerm]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several ranks has of a model, and holds of it."""

    rank: int
    pid: int
    threads: int
    heads: int
    kv_heads: int
    experts: int = 0
    """Whole ones of each layer; 0: a part of every one, or there are none."""
    first_layer: int = 0
    layers: int = 0
    """From that one on."""
    planned_weights_bytes: int
    weights_bytes: int
    kv_pool_bytes: int
    """Of its part of the pages."""
    device: str = ""
    """Its GPU; empty: it computes on the CPU."""
    engine: int = 0
    """That it is of, where there are several."""
    node: int = 0
    """That it is on, where there are several."""


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines behind one API: how it does, and what it holds."""

    engine: int
    pid: int | None
    """None: it has no process now."""
    status: str
    """ready, sleeping, hung, restarting, loading or dead."""
    device: str
    weights_bytes: int
    kv_pool_bytes: int
    running: int
    waiting: int
    restarts: int


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tier, at the moment the engine became ready."""

    tier: str = "ram"
    total_bytes: int
    free_bytes: int
    """Before anything was loaded."""
    limited_by: str
    budget_bytes: int
    terms: list[MemoryTerm]
    page_bytes: int
    """Of the KV pool: what one block takes."""
    held_bytes: int = 0
    """On a GPU: what the process held when it was ready, as the driver counts it."""
    given_back_bytes: int = 0
    """Of what the profiled step needed, what is not held between steps."""
    loading_bytes: int
    """Planned for the peak of loading, before there is a KV pool."""
    loading_peak_bytes: int
    """Measured: the most the process held until its weights were in place."""
    below: list[LowerTier] = []
    ranks: list[RankMemory] = []
    """Of each, where several compute the model together; terms are those of all."""


class VramBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU's engine is asked to keep to."""

    budget_bytes: int
    at_most_free: bool = False
    """No more of it than is there: it is a share of the whole GPU, and was not set."""
    kv_bytes: int | None = None
    """The size the KV pool was set to, or to which it was given up while nobody asks; None: what the budget leaves, as
    far as it is of use."""


class LayersGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Of layers that may come to stay on a GPU, and leave it."""

    streamed: tuple[int, ...]
    """That come for every step; the others stay."""
    moved_bytes: int
    """In every step."""
    weights_bytes: int
    """Of all that stays on the GPU."""
    slots_bytes: int
    pinned_bytes: int
    """Of RAM."""


class ExpertsGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Of experts that may come to stay on a GPU, and leave it."""

    resident: tuple[int, ...]
    """That stay, of each layer whose experts do not all."""
    weights_bytes: int
    """Of all that stays on the GPU."""
    slots_bytes: int
    """With tables of places."""
    pinned_bytes: int
    """Of RAM."""


class SleepingKV(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of an engine that sleeps, and which prefixes they hold: two files that some process holds open."""

    identity: bytes
    """Of all that they depend on besides their tokens."""
    pages_path: str
    index_path: str
    held_bytes: int


class VramGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What it keeps to from now on."""

    budget_bytes: int
    """More than was asked for where that was less than weights, workspaces and one sequence of full length need."""
    blocks: int
    """Pages of the KV pool, the null page included."""
    kv_bytes: int
    """Memory behind them."""
    layers: LayersGrant | None = None
    """None: all stay, or none can come and go."""
    experts: ExpertsGrant | None = None
    """None: likewise."""


class PoolChange(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool has become smaller or larger by itself, within the same budget or, with layers or experts, within
    another."""

    blocks: int
    """Pages, the null page included."""
    kv_bytes: int
    """Memory behind them."""
    reason: str
    lowered: bool
    """It has less than it would have had."""
    budget_bytes: int | None = None
    """Where that has changed with it."""
    stood_still_s: float = 0.0
    """How long no step ran for it."""
    granted: VramGrant | None = None
    """Of layers or experts as well; None: only the pool has changed."""
