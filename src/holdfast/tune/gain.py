"""By how much one configuration is better than another, from rounds in which both were measured one after the other.

A round's difference is what the two had under the same load within minutes, so that a machine that slows down during
the evening does not count for either. Student's t at 95%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

FEWEST_ROUNDS, MOST_ROUNDS = 3, 6
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""By degrees of freedom."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the default's goodput."""

    change: float
    low: float
    high: float
    rounds: int
    default_goodput: float
    goodput: float

    @property
    def proven(self) -> bool:
        return self.low > 0


def gain_of(defaults: Sequence[float], others: Sequence[float]) -> Gain | None:
    """Goodput by round. None: too few rounds, or a default that answered nothing in time: there is no share of 0."""
    rounds = min(len(defaults), len(others))
    base = sum(defaults[:rounds]) / rounds if rounds else 0.0
    if rounds < FEWEST_ROUNDS or base <= 0:
        return None
    differences = [other - default for default, other in zip(defaults, others, strict=False)]
    mean = sum(differences) / rounds
    spread = math.sqrt(sum((one - mean) ** 2 for one in differences) / (rounds - 1))
    reach = _T95.get(rounds - 1, 2.0) * spread / math.sqrt(rounds)
    return Gain(
        change=mean / base,
        low=(mean - reach) / base,
        high=(mean + reach) / base,
        rounds=rounds,
        default_goodput=base,
        goodput=sum(others[:rounds]) / rounds,
    )
