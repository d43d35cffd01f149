"""Commands in the pages are those that there are: a reader who copies a line is understood. Runs none of them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.commands.serve import read_settings
from holdfast.cli.main import COMMANDS, parse_command_line

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_COMMAND = re.compile(r"^    (?:.* \| |\$ |  command: | +run: +)?holdfast ((?:" + "|".join(COMMANDS) + r")\b.*)$", re.M)
_OPTIONAL = re.compile(r" \[[^\]]*\]")
_ENDS = ("|", "&", "&&", ";", ">", "2>&1")


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for found in _COMMAND.finditer(text):
            yield page.name, _OPTIONAL.sub("", found[1])


def test_each_command_is_understood() -> None:
    seen = set()
    for page, command in commands():
        words = shlex.split(command, comments=True)
        words = words[: next((place for place, word in enumerate(words) if word in _ENDS), len(words))]
        try:
            _, parsed = parse_command_line(words)
            if words[0] == "serve":
                read_settings(parsed)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: holdfast {command}\n{error}")
        seen.add(words[0])
    assert seen >= {"serve", "plan", "bench", "tune", "chat", "run-batch", "doctor", "kv-store"}


def test_each_benchmark_can_be_started_as_the_pages_say() -> None:
    """As a module from the repository's root, or as a file, which has to find the others by itself."""
    text = "\n".join(page.read_text() for page in PAGES)
    modules = set(re.findall(r"python\s+-m\s+(benchmarks[.\w]*\w)", text))
    scripts = set(re.findall(r"python\s+(benchmarks/[\w/]+\.py)", text))
    assert len(modules) > 5
    assert len(scripts) > 5
    for path in [*(f"{module.replace('.', '/')}.py" for module in modules), *scripts]:
        assert (ROOT / path).is_file(), path
    for path in scripts:
        source = (ROOT / path).read_text()
        imports = [
            node.module or ""
            for node in ast.parse(source).body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks")
        ]
        if imports:
            before = source.partition("\nfrom benchmarks")[0]
            assert "sys.path.insert(0, " in before, f"python {path} does not find {imports[0]}"
