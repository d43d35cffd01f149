"""A pytest plugin: modules that vLLM's tests import, as far as a test of an HTTP API needs them.

  tests.utils   RemoteOpenAIServer starts `holdfast serve` under the name of the model that a test wants
  vllm...       anything, which is false and does nothing; but for its tokenizer, which is the served model's
  jsonschema    where it is not installed, a test that validates is skipped, not passed

Tests that ask no server, but vLLM's Python classes, are left out: here they would test `Nothing`.
Adapters are further names of the model. Flags that are refused are left out, and told.
"""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import time
import types
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import requests

import holdfast

MODEL = os.environ.get("COMPAT_MODEL", "smollm2")
SERVER = urllib.parse.urlsplit(os.environ.get("COMPAT_SERVER", ""))
"""One that runs already."""
START_LIMIT_S = 120.0
LORA_FLAGS = {"--enable-lora": 0, "--max-lora-rank": 1, "--max-cpu-loras": 1, "--max-loras": 1, "--lora-modules": -1}
"""Flags that are not passed on, and how many words follow; -1: all up to the next flag."""
REPLACED = {**LORA_FLAGS, "--dtype": 1, "--served-model-name": -1, "--chat-template": 1, "--gpu-memory-utilization": 1}
dropped: Counter[str] = Counter()


class Nothing:
    """Whatever a test asks of vLLM's insides."""

    def __init__(self, *given: object, **named: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *given: object, **named: object) -> Any:
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""


class Response(Nothing):
    """A body by its members, as vLLM's typed responses are read; of what type they are is not checked."""

    @staticmethod
    def model_validate(value: Any) -> Any:
        if isinstance(value, dict):
            return types.SimpleNamespace(**{name: Response.model_validate(inner) for name, inner in value.items()})
        return [Response.model_validate(inner) for inner in value] if isinstance(value, list) else value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module below these names."""

    roots = ("vllm", "fastapi", "PIL", "tests.conftest", "tests.utils", "tests.models")

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        known: dict[str, Any] = {
            "RemoteOpenAIServer": RemoteOpenAIServer,
            "VLLM_PATH": os.getcwd(),
            "get_tokenizer": lambda *given, **named: tokenizer(),
            "__version__": holdfast.__version__,
        }

        def attribute(name: str) -> Any:
            if name in known:
                return known[name]
            if name.startswith("__"):
                raise AttributeError(name)
            if name.isupper():  # Flags and variables for vLLM's other platforms.
                return {} if "ENV" in name else []
            kind = Response if name.endswith("Response") else ValueError if name.endswith("Error") else Nothing
            return type(name, (kind,), {}) if name[:1].isupper() else Nothing()

        module.__getattr__ = attribute  # type: ignore[method-assign]


def tokenizer() -> Any:
    from holdfast.checkpoints.sources.resolve import locate
    from holdfast.text.tokenizer.tokenizer import Tokenizer

    return Tokenizer.from_files(locate(MODEL))


class RemoteOpenAIServer:
    """As vLLM's tests use it."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **named: Any) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if SERVER.port is not None:
            self.host, self.port = SERVER.hostname or "127.0.0.1", SERVER.port
            return
        self.host, self.port = "127.0.0.1", _free_port()
        self._environment = {**os.environ, **(named.get("env_dict") or {})}
        flags, names, adapters = _kept([*vllm_serve_args])
        base = [sys.executable, "-m", "holdfast.cli.main", "serve", MODEL, "--host", self.host, "--port"]
        base += [str(self.port), "--disable-access-log", "--served-model-name", *(names or [model]), *adapters]
        self._process = self._started([*base, *flags]) or self._started(base)
        if self._process is None:
            raise RuntimeError("holdfast serve did not start")
        if flags and self._process.args == base:
            dropped.update(flag for flag in flags if flag.startswith("--"))

    def _started(self, command: list[str]) -> subprocess.Popen[bytes] | None:
        process = subprocess.Popen(command, env=self._environment, stdout=sys.stderr, stderr=sys.stderr)
        end_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end_s and process.poll() is None:
            try:
                if requests.get(self.url_for("health"), timeout=5).status_code == 200:
                    return process
            except requests.RequestException:
                pass
            time.sleep(0.25)
        process.kill()
        process.wait()
        return None

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def _named(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120} | named

    def get_client(self, **named: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._named(named))

    def get_async_client(self, **named: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._named(named))

    def get_client_anthropic(self, **named: Any) -> Any:
        anthropic = pytest.importorskip("anthropic")
        return anthropic.Anthropic(**self._named(named) | {"base_url": self.url_root})

    def get_async_client_anthropic(self, **named: Any) -> Any:
        anthropic = pytest.importorskip("anthropic")
        return anthropic.AsyncAnthropic(**self._named(named) | {"base_url": self.url_root})

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _kept(flags: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What is passed on; the names that the model is served under, if they are said; and those of adapters."""
    kept: list[str] = []
    names: dict[str, list[str]] = {"--served-model-name": [], "--lora-modules": []}
    place = 0
    while place < len(flags):
        flag = flags[place].partition("=")[0]
        place += 1
        if flag not in REPLACED:
            kept.append(flags[place - 1])
            continue
        following = next((end for end in range(place, len(flags)) if flags[end].startswith("--")), len(flags))
        words = flags[place : following if REPLACED[flag] < 0 else place + REPLACED[flag]]
        place += len(words)
        if flag in names:
            names[flag] += [word.partition("=")[0] for word in words if not word.startswith("{")]
    return kept, names["--served-model-name"], names["--lora-modules"]


class _Schemas(types.ModuleType):
    """In place of jsonschema."""

    def validate(self, *given: object, **named: object) -> None:
        pytest.skip("jsonschema is not installed")


def _transformers_tokenizer() -> None:
    """Tests that count tokens load the tokenizer of the model they name: it is the served one's."""
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import AutoTokenizer

    from holdfast.checkpoints.sources.resolve import locate

    load, path = AutoTokenizer.from_pretrained, locate(MODEL).path
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    AutoTokenizer.from_pretrained = lambda *given, **named: load(folder, **where)


def pytest_configure(config: pytest.Config) -> None:
    _transformers_tokenizer()
    if importlib.util.find_spec("pybase64") is None:
        sys.modules["pybase64"] = base64  # The same functions, slower.
    if importlib.util.find_spec("jsonschema") is None:
        sys.modules["jsonschema"] = _Schemas("jsonschema")


def _asks_a_server(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", [])
    if any("server" in name or "client" in name for name in fixtures):
        return True
    return "RemoteOpenAIServer" in inspect.getsource(item.function)  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Told at once: a run takes long, and may not come to its end."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        said = crash.message.replace("\n", " ")[:200]
        print(f"\n{report.nodeid}: {os.path.basename(crash.path)}:{crash.lineno}: {said}", flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counted: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            counted.setdefault(report.nodeid.partition("::")[0], Counter())[outcome] += 1
    for name, outcomes in sorted(counted.items()):
        terminalreporter.write_line(f"{name}: {', '.join(f'{count} {kind}' for kind, count in outcomes.items())}")
    if dropped:
        terminalreporter.write_line(f"flags left out because they were refused: {', '.join(sorted(dropped))}")


sys.meta_path.insert(0, Finder())
