"""Pages that come to the pool: who no longer waits for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from holdfast.kvcache import KVCache, KVLayout, Tier, TierLimits, form_groups
from holdfast.kvcache.loads import PageLoad


class NotWalked(OrderedDict[PageLoad, None]):
    def __iter__(self) -> Iterator[PageLoad]:
        raise AssertionError("all that is in line is looked at")


def test_who_waits_no_longer_leaves_the_line_of_others_alone() -> None:
    """Else to give up many who wait for much would take the square of it."""
    groups, places = form_groups([None])
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4)
    tiers = KVCache(layout, 40, True, TierLimits(host_pages=40, loads_a_plan=2)).tiers
    assert tiers is not None
    keys = [bytes([number]) * 16 for number in range(12)]
    for key in keys:
        place = tiers.host.reserve(0, key)
        assert place is not None
        tiers.host.arrived(place)
    tiers._loads.queued[Tier.HOST] = NotWalked()
    fetches = []
    for chain in (keys[:8], keys[:6], keys[8:]):
        fetches.append(tiers.begin(chain, tiers.count(chain, len(chain), (0,)), 0)[0])
    assert len(tiers.plan([], 0)) == 2
    tiers.drop(fetches[0])
    assert tiers.queued == 4 + 4, "of the first six another still needs four that were not planned"
    tiers.drop(fetches[1])
    tiers.drop(fetches[2])
    assert tiers.queued == 0
    for copy in list(tiers._copies):
        tiers.end(copy, True)
    assert not tiers._loads._awaited
    tiers._loads.queued[Tier.HOST] = OrderedDict()
    tiers.check()
