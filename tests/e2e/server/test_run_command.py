"""`holdfast run` with a real server in the background: started once, found again, listed, stopped; and what it says
where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import PATIENCE_S

from holdfast.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_starts")

SAMPLING = ("--max-tokens", "3", "--temperature", "0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Servers and logs of this test alone."""
    from holdfast.checkpoints.sources import builtin

    tokenizer = builtin.cached_path(builtin.BUILTINS[0])
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models").mkdir(parents=True)
    for path in tokenizer.parent.glob(tokenizer.name + "*"):
        (tmp_path / "cache" / "models" / path.name).symlink_to(path)
    yield tmp_path
    main(["stop", "--all", "--now"])


def asked(*words: str, stdin: str = "", environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "run", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment or dict(os.environ),
    )


def test_a_server_is_started_once_and_stays(
    home: Path, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_arguments[: tiny_arguments.index("--served-model-name")]
    first = asked(model[0], "Say", *SAMPLING, *model[1:], "something")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    (log,) = (home / "cache" / "logs").iterdir()
    assert f"its log: {log}" in first.stderr
    # The second asks the same server: what is on stdin comes before the prompt.
    second = asked(model[0], "something", *SAMPLING, stdin="Say\n")
    assert second.returncode == 0, second.stderr
    assert "starting" not in second.stderr
    assert "using http://127.0.0.1:" in second.stderr, "whose answer it is"
    assert main(["ps", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    process = psutil.Process(listed["process"]["pid"])
    assert (listed["status"], listed["process"]["log"]) == ("ready", str(log))
    assert listed["process"]["path"] == str(Path(model[0]).resolve())
    # Its session is its own: a Ctrl-C or a closed terminal does not reach it.
    assert os.getsid(process.pid) == process.pid
    # Nothing is asked: the model is there, and that is said.
    nothing = asked(model[0])
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert f"is served at {listed['url']}" in nothing.stderr
    # Other settings are not silently left aside.
    other = asked(model[0], "hi", "--max-model-len", "32")
    assert other.returncode == 2
    assert f"holdfast stop {process.pid}" in other.stderr
    # What is served from a path is listed, and is not ours to remove.
    assert main(["list"]) == 0
    assert f"served at {listed['url']}" in capsys.readouterr().out
    assert main(["rm", model[0], "--yes"]) == 2
    assert main(["stop", model[0]]) == 0
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert list((home / "run").glob("*.json")) == []


def test_a_server_that_does_not_start_says_why(home: Path) -> None:
    # As it is by default: servers are also looked for by their command lines.
    environment = os.environ | {"XDG_RUNTIME_DIR": str(home)}
    del environment["HOLDFAST_RUNTIME_DIR"]
    done = asked("smollm2", "hi", "--dtype", "float99", environment=environment)
    assert done.returncode == 2
    assert "'float99' is not valid" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"log:    {home}" in done.stderr
    assert done.stdout == ""
