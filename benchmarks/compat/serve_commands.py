"""Every `vllm serve` command of vLLM's docs, examples and recipes, read by the parser of `holdfast serve`.

    python -m benchmarks.compat.serve_commands --checkout ~/vllm [--checkout ~/recipes] [--show]

Nothing is started: a command counts as taken when all of its settings are. Whether the model is one of ours and how
many GPUs there are is left aside: flags that divide a model over several of them are taken out first, and counted. So
is --config, whose file is the reader's. Commands with an ellipsis, with a value cut off, or for vllm-omni, which is
another program (--omni), are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.commands.serve import read_settings, refused_settings
from holdfast.cli.main import parse_command_line
from holdfast.errors import HoldfastError

KINDS = (".md", ".yaml", ".yml", ".sh", ".py", ".txt", ".rst", ".ipynb")
_MODULE = r"python3? -m vllm\.entrypoints\.openai\.api_server"
_COMMAND = re.compile(
    r"""(?:^|[`"'(]|\$ |# |- |run: |exec |&& |env )\s*(?:(?:env )?(?:[A-Za-z_]\w*=\S+\s+)*)"""
    rf"""(?:vllm serve|{_MODULE})[ ]+([^`\n]+)""",
    re.MULTILINE,
)
_NO_COMMAND = ("--help", "--omni", "...", "…")
_END = re.compile(r"(?:[;|&]+|\d?>+(?:&\d)?|<)\S*")
_FURTHER_GPUS = {
    "--tensor-parallel-size": 1, "-tp": 1, "--tensor-parallel": 1,
    "--pipeline-parallel-size": 1, "-pp": 1, "--data-parallel-size": 1, "-dp": 1,
    "--data-parallel-size-local": 1, "-dpl": 1, "--data-parallel-rank": 1, "-dpn": 1, "--data-parallel-start-rank": 1,
    "-dpr": 1, "--data-parallel-address": 1, "-dpa": 1, "--data-parallel-rpc-port": 1, "-dpp": 1,
    "--data-parallel-backend": 1, "-dpb": 1, "--data-parallel-hybrid-lb": 0, "--data-parallel-external-lb": 0,
    "--nnodes": 1, "-n": 1, "--node-rank": 1, "-r": 1, "--master-addr": 1, "--master-port": 1, "--headless": 0,
    "--decode-context-parallel-size": 1, "-dcp": 1, "--prefill-context-parallel-size": 1, "-pcp": 1, "--config": 1,
}  # fmt: skip
"""Flags of several GPUs or machines, and how many words follow each."""


@dataclass(frozen=True, slots=True)
class Command:
    place: str
    words: tuple[str, ...]
    gpus: bool
    """Whether flags of several GPUs were taken out."""


def commands(checkout: Path) -> Iterator[Command]:
    for path in sorted(checkout.rglob("*")):
        within = path.relative_to(checkout)
        if path.suffix not in KINDS or not path.is_file() or within.parts[0] in ("tests", "vllm"):
            continue
        text = re.sub(r"\\+(?:n?)[ \t]*\n\s*(?:# )?", " ", path.read_text(errors="replace"))
        for found in _COMMAND.finditer(text):
            words = _words(found[1])
            if words is None or any(mark in found[1] for mark in _NO_COMMAND):
                continue
            kept = _without_gpus(words)
            yield Command(str(path.relative_to(checkout.parent)), tuple(kept), kept != words)


def _words(text: str) -> list[str] | None:
    try:
        words = shlex.split(text.strip().strip("\\"), comments=True)
    except ValueError:  # A quote that goes on in the next line.
        return None
    end = next((place for place, word in enumerate(words) if _END.fullmatch(word)), len(words))
    return words[:end] or None


def _without_gpus(words: list[str]) -> list[str]:
    kept: list[str] = []
    place = 0
    while place < len(words):
        name, equals, _ = words[place].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else re.sub(r"\d+$", "", name)
        place += 1
        if name in _FURTHER_GPUS:
            joined = equals or (not words[place - 1].startswith("--") and words[place - 1] != name)
            place += 0 if joined else _FURTHER_GPUS[name]
        else:
            kept.append(words[place - 1])
    return kept


def refusal(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """What is said of it, and of which settings; None: it is taken."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _, parsed = parse_command_line(["serve", *words])
            names = [one.name for one in refused_settings(parsed)]
            read_settings(parsed)
    except HoldfastError as error:
        lines = error.message.splitlines()
        named = [line.split()[0] for line in lines[1:]] if "settings cannot" in lines[0] else []
        return lines[0], named or [error.field or lines[0]]
    return ("", names) if names else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkout", required=True, action="append", type=Path, help="a checkout of vLLM or its recipes"
    )
    parser.add_argument("--show", action="store_true", help="show every command that is refused")
    known = parser.parse_args()
    found = list(dict.fromkeys(command for checkout in known.checkout for command in commands(checkout.resolve())))
    refused: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    taken = 0
    for command in found:
        why = refusal(command.words)
        if why is None:
            taken += 1
            continue
        names = sorted({name.lstrip("-").replace("_", "-").partition("=")[0] for name in why[1]})
        refused.update(names)
        alone.update(names if len(names) == 1 else ())
        if known.show:
            print(f"{command.place}: {shlex.join(command.words)}\n    {why[0]} {' '.join(names)}")
    gpus = sum(command.gpus for command in found)
    print(f"{taken} of {len(found)} commands are taken ({taken / max(1, len(found)):.0%}); {gpus} ask for several GPUs")
    for name, count in refused.most_common():
        print(f"  {count:4} {name} ({alone[name]} for it alone)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
