"""vLLM's own tests of its HTTP API, out of a checkout that the user names, run against `holdfast serve`.

    python -m benchmarks.compat.vllm_entrypoints --checkout ~/vllm [--model smollm2] [--server URL] [-k ...]

Nothing of vLLM is installed or copied: its test files are collected where they lie, with `vllm_plugin` in place of the
few modules they import. One small model answers for every model they name, so that tests of what a particular model
says fail; the summary counts what passes, file by file. With --server no test starts one of its own, which takes a
tenth of the time; those of flags fail then. Serve it without --served-model-name, so that it answers to every name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_extra_content_fields.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_async_tokenization.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "pooling/basic/test_truncation.py",
    "pooling/classify/test_online.py",
    "pooling/embed/test_online.py",
    "pooling/embed/test_online_dimensions.py",
    "pooling/scoring/test_bi_encoder_online.py",
    "pooling/scoring/test_cross_encoder_online.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
    "tool_parsers/test_hermes_tool_parser.py",
)
"""Below tests/entrypoints: those that start a server for a model that generates text, or embeds it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", required=True, type=Path, help="a checkout of vLLM")
    parser.add_argument("--model", default="smollm2", help="what answers for every model that the tests name")
    parser.add_argument("--server", metavar="URL", help="a running server for all tests, whatever flags they ask for")
    parser.add_argument("--file", action="append", help="only these of the files, by a part of their names")
    known, further = parser.parse_known_args()
    tests = known.checkout.resolve() / "tests" / "entrypoints"
    if not tests.is_dir():
        parser.error(f"{tests} is not there: --checkout must be a checkout of vLLM")
    chosen = [name for name in FILES if not known.file or any(part in name for part in known.file)]
    there = [str(tests / name) for name in chosen if (tests / name).exists()]
    for name in chosen:
        if not (tests / name).exists():
            print(f"not in this checkout: {name}")
    command = [sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull, f"--rootdir={known.checkout}"]
    # Not by its package: a whole checkout of vLLM has a package `benchmarks` too.
    command += ["-p", "vllm_plugin", "-p", "tests.entrypoints.conftest", "-p", "no:cacheprovider"]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["--import-mode=importlib", "--continue-on-collection-errors", "-q", "--tb=line", "-rfE"]
    command += [*further, *there]
    path = os.pathsep.join([str(known.checkout.resolve()), str(Path(__file__).parent), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "COMPAT_MODEL": known.model}
    if known.server:
        environment["COMPAT_SERVER"] = known.server
    return subprocess.run(command, cwd=known.checkout, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
