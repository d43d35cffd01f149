"""llama.cpp's own tests of its server, out of a checkout that the user names, run against `holdfast serve`.

    python -m benchmarks.compat.llama_server --checkout ~/llama.cpp [--model smollm2] [--file chat] [-k ...]

Nothing of llama.cpp is installed or copied: its test files are collected where they lie, and `llama_plugin` starts our
server in place of llama-server. One small model answers for every model, so tests of what a particular model says fail.
Left aside are the files of what only llama-server has: its router, slots, vision, built-in tools, speculation, infill.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_completion.py",
    "test_embedding.py",
    "test_ignore_eos.py",
    "test_security.py",
    "test_template.py",
    "test_tokenize.py",
    "test_tool_call.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", required=True, type=Path, help="a checkout of llama.cpp")
    parser.add_argument("--model", default="smollm2", help="what answers for every model that the tests name")
    parser.add_argument("--file", action="append", help="only these of the files, by a part of their names")
    known, further = parser.parse_known_args()
    tests = known.checkout.resolve() / "tools" / "server" / "tests"
    if not tests.is_dir():
        parser.error(f"{tests} is not there: --checkout must be a checkout of llama.cpp")
    chosen = [name for name in FILES if not known.file or any(part in name for part in known.file)]
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.compat.llama_plugin", "-p", "no:cacheprovider"]
    command += ["-q", "--tb=no", "-m", "not slow", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += [*further, *(f"unit/{name}" for name in chosen)]
    path = os.pathsep.join([str(tests), str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "COMPAT_MODEL": known.model, "DEBUG_EXTERNAL": ""}
    return subprocess.run(command, cwd=tests, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
