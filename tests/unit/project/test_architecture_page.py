"""The page on how Holdfast is built names rooms and files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "holdfast"
ROWS = re.findall(
    r"^\|([^|\n]*)\|([^|\n]*)\|([^|\n]*)\|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE
)


def test_every_room_is_in_the_table_and_every_one_of_the_table_is_there() -> None:
    named = {name for row, rooms, _ in ROWS if row.strip().isdecimal() for name in re.findall(r"`(\w+)`", rooms)}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {"errors", "units", "held_interrupts", "leave", "socket_folder"}
    assert named == packages - {"entrypoints", "lora", "utils", "v1"} | modules


def test_every_file_that_is_named_is_there() -> None:
    room, absent, count = "", [], 0
    for first, _, files in ROWS:
        if first.strip().isdecimal() or "`" not in files:
            continue
        room = first.strip().strip("`") or room
        for name in re.findall(r"`([\w*]+)`", files):
            count += 1
            if not [*(SOURCE / room).glob(f"{name}.py"), *(SOURCE / room).glob(f"{name}/")]:
                absent.append(f"{room}/{name}")
    assert absent == []
    assert count > 100
