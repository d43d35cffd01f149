"""`FlexibleArgumentParser`, for scripts that add an engine's flags to their own: argparse that reads flags as `holdfast
serve` does (`_` for `-`, parts of a table by a dot)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from holdfast.cli.dotted_flags import joined
from holdfast.cli.main import spelled

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(argparse.ArgumentParser):
    def add_argument(self, *names: Any, **named: Any) -> argparse.Action:
        """Under both spellings: what is typed is read with dashes."""
        dashed = [name.replace("_", "-") for name in names if isinstance(name, str) and name.startswith("--")]
        if "_" in "".join(names) and "dest" not in named and dashed:
            named["dest"] = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
        return super().add_argument(*dict.fromkeys([*names, *dashed]), **named)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(spelled(joined(words)), namespace)
