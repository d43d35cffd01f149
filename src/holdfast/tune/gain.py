"""By how much one configuration is better than another, from rounds in which both were measured one after the other.

A round's difference is what the two had under the same load within minutes, so that a machine that slows down during
the evening does not count for either. Student's t at a nominal 99%: it is asked after every round, and of the best of
several, and who looks often is wrong more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

FEWEST_ROUNDS, USUAL_ROUNDS, MOST_ROUNDS = 3, 6, 60
WITHIN = 0.05
"""Of the best: less than that is not looked for."""
LEAST_KEPT = 0.03
"""Of the default's goodput: what the mean of the rounds must be higher by, where they prove nothing either way."""
CONFIDENCE = 0.99
_T = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
"""By degrees of freedom, from 1."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the default's goodput. `low` and `high`: nominal 99%, asked after every round."""

    change: float
    low: float
    high: float
    rounds: int
    default_goodput: float
    goodput: float

    @property
    def proven(self) -> bool:
        return self.low > 0

    @property
    def decided(self) -> bool:
        """It is better, or not by as much as is looked for."""
        return self.proven or self.high < WITHIN

    @property
    def likely(self) -> bool:
        """Not proven, but the better guess: it may well be better by more than is looked for, and was in the mean."""
        return not self.decided and self.change >= LEAST_KEPT


def gain_of(defaults: Sequence[float], others: Sequence[float]) -> Gain | None:
    """Goodput by round. None: too few rounds, or a default that answered nothing in time: there is no share of 0."""
    rounds = min(len(defaults), len(others))
    base = sum(defaults[:rounds]) / rounds if rounds else 0.0
    if rounds < FEWEST_ROUNDS or base <= 0:
        return None
    differences = [other - default for default, other in zip(defaults, others, strict=False)]
    mean = sum(differences) / rounds
    spread = math.sqrt(sum((one - mean) ** 2 for one in differences) / (rounds - 1))
    reach = _student(rounds - 1) * spread / math.sqrt(rounds)
    return Gain(
        change=mean / base,
        low=(mean - reach) / base,
        high=(mean + reach) / base,
        rounds=rounds,
        default_goodput=base,
        goodput=sum(others[:rounds]) / rounds,
    )


def _student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    normal = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return normal + (normal**3 + normal) / (4 * freedom)
