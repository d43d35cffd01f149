"""Clients that people really use, each in an environment of its own, against a real server. Run by `make test-clients`.

An environment is made once, under the cache folder, from the versions pinned in requirements/; what a client does
stands in its program under programs/, in that client's own words.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.sources.cache import cache_folder

HERE = Path(__file__).resolve().parent
INSTALL_TIMEOUT_S = 1800
PROGRAM_TIMEOUT_S = 280


Found = dict[str, dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{HERE}{os.sep}"):  # A path's parents are slow, for ten thousand tests.
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(INSTALL_TIMEOUT_S))


def _run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(name: str) -> Path:
    """The folder of a client's Python, made when it is missing or other versions are asked for."""
    folder, wanted = cache_folder() / "clients" / name, HERE / "requirements" / f"{name}.txt"
    stamp, is_wanted = folder / "made-from", f"{sys.version}\n{wanted.read_text()}"
    if not stamp.exists() or stamp.read_text() != is_wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        # Most of what is installed is never imported: what is will be compiled then.
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        _run([*pip, "--disable-pip-version-check", "-r", str(wanted)], timeout=INSTALL_TIMEOUT_S)
        stamp.write_text(is_wanted)
    return folder


def node_environment(name: str) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed (Debian: apt-get install nodejs npm)")
    folder, wanted = cache_folder() / "clients" / name, (HERE / "requirements" / f"{name}.json").read_text()
    stamp = folder / "made-from"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text(wanted)
        _run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, timeout=INSTALL_TIMEOUT_S)
        stamp.write_text(wanted)
    return folder


def _variables(url: str, model: str) -> dict[str, str]:
    """Nothing may lead a client anywhere else than to our server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "VIRTUAL_ENV"))}
    return {
        **kept,
        "BASE_URL": f"{url}/v1",
        "MODEL": model,
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": "none",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def client_environment() -> Callable[[str], Path]:
    """client_environment(NAME): the folder of its Python."""
    return environment


@pytest.fixture(scope="session")
def npm_environment() -> Callable[[str], Path]:
    """npm_environment(NAME): the folder of its node_modules."""
    return node_environment


@pytest.fixture(scope="session")
def run_program() -> Callable[..., Found]:
    """run_program(CLIENT, URL, MODEL, more words): what each case of programs/use_CLIENT returned, or how it failed."""

    def run(client: str, url: str, model: str = "smollm2", *words: str) -> Found:
        program = f"use_{client.replace('-', '_')}"
        if (script := HERE / "programs" / f"{program}.mjs").exists():
            # Node looks for packages beside the program.
            folder = node_environment(client)
            command = ["node", str(shutil.copy(script, folder / script.name))]
        else:
            command = [str(environment(client) / "bin" / "python"), str(HERE / "programs" / f"{program}.py")]
        said = _run([*command, *words], env=_variables(url, model), timeout=PROGRAM_TIMEOUT_S)
        return dict(json.loads(said.splitlines()[-1]))

    return run


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's tokenizer as Hugging Face stores one, for clients that count tokens themselves."""
    from holdfast.checkpoints import locate
    from holdfast.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_files(locate("smollm2", revision=None))
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": tokenizer.chat_template}))
    return folder
