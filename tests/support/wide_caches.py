"""The planner's caches, wide enough for a whole run of tests. They are sized for one plan: hundreds of tests that ask
about the same models would count each of them again. Knows nothing of what is cached."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from typing import Any

WIDE = 512
OWNERS = ("holdfast.planner", "holdfast.footprint")


def widen_caches() -> None:
    """Keys are the very objects or values that are asked about, so that a wider cache gives no other answer."""
    for owner in OWNERS:
        for found in pkgutil.walk_packages(importlib.import_module(owner).__path__, f"{owner}."):
            importlib.import_module(found.name)
    wide: dict[Any, Any] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("holdfast.")]:
        for name, value in list(vars(module).items()):
            if _is_narrow(value):
                if value not in wide:
                    wide[value] = functools.lru_cache(maxsize=WIDE)(value.__wrapped__)
                setattr(module, name, wide[value])


def _is_narrow(value: object) -> bool:
    if not isinstance(value, functools._lru_cache_wrapper) or not value.__module__.startswith(OWNERS):
        return False
    return 0 < (value.cache_parameters()["maxsize"] or 0) < WIDE
