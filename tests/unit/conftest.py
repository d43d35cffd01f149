"""What all tests of tests/unit share: the planner's caches."""

from __future__ import annotations

from wide_caches import widen_caches

widen_caches()
