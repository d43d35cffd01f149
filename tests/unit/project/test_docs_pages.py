"""Pages say a thing once, and nothing that the server contradicts. Knows no page's subject."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.server.endpoints.unsupported import PATHS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "CHANGELOG.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALIKE_CHARS = 45


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_text_begins_as_another_does(page: Path) -> None:
    """What two merges leave of one paragraph."""
    text = [line.strip() for line in page.read_text().splitlines() if not line.startswith(("|", "    "))]
    begins = [line[:ALIKE_CHARS] for line in text if len(line) >= ALIKE_CHARS]
    assert sorted(begins) == sorted(set(begins))


def test_each_path_said_to_be_absent_is() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    [said] = re.findall(r"answered with 404, the reason and an alternative: (.+?)\n\n", page, re.DOTALL)
    for path in re.findall(r"`(/[^`]*)`", said):
        assert any(absent.startswith(path.rstrip("*")) for absent in PATHS), path
    rows = re.findall(r"^\| `(?:GET|POST) .*?\|", page, re.MULTILINE)
    served = [path for row in rows for path in re.findall(r"(?<=[` ])/[\w./]+(?=`)", row)]
    assert len(served) > 20
    assert sorted(served) == sorted(set(served))
