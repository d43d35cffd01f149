"""A table checked in one test: thousands of tests of a microsecond cost more than all of them compute. A failure says
which rows failed, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Row = TypeVar("Row")


def check_rows(rows: Iterable[Row], check: Callable[[Row], None], name: Callable[[Row], str]) -> None:
    failed = []
    for row in rows:
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:  # A failure of that row, whatever it is.
            failed.append(f"{name(row)}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
