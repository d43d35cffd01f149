"""Counters of an engine process that was started again go on where those of the one before ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.engine.process.stats import continued
from holdfast.records import EngineStats, KVStoreUse, KVTierUse

SIZE = "blocks_total"
"""Of the pool, and no counter."""


def counters(of: msgspec.Struct, name: str = "") -> Iterator[tuple[str, Any]]:
    """By their names: `..._total`, and by reason."""
    for field, value in msgspec.structs.asdict(of).items():
        if field.endswith(("_total", "_by_reason", "_by_use")) and field != SIZE:
            yield f"{name}{field}", value
        elif isinstance(value, msgspec.Struct):
            yield from counters(value, f"{name}{field}.")
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, msgspec.Struct):
                    yield from counters(one, f"{name}{field}.")


def of_each(kind: type[msgspec.Struct], **others: Any) -> Any:
    """All its own counters at 1."""
    own = {field: 1 for field in kind.__struct_fields__ if field.endswith("_total")}
    return kind(**own, **others)


def test_every_counter_goes_on() -> None:
    store = of_each(
        KVStoreUse, dropped_by_reason={"full": 1}, missed_by_reason={"damaged": 1}, waited_s_by_use={"read": 1}
    )
    stats = of_each(EngineStats, kv_tiers=[of_each(KVTierUse, tier="ram")], kv_store=store)
    found = dict(counters(continued(stats, stats)))
    assert set(found) == dict(counters(stats)).keys()
    assert len(found) > 12
    for name, value in found.items():
        assert value in (2, {"full": 2}, {"damaged": 2}, {"read": 2}), name


def test_reasons_of_both_are_kept() -> None:
    before, now = (EngineStats(kv_store=KVStoreUse(missed_by_reason={reason: 1})) for reason in ("damaged", "slow"))
    store = continued(before, now).kv_store
    assert store is not None
    assert store.missed_by_reason == {"damaged": 1, "slow": 1}
    assert continued(EngineStats(), now).kv_store == now.kv_store
    assert continued(before, EngineStats()).kv_store is None
