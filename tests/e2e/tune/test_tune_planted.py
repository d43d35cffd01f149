"""`holdfast tune` over real sockets and processes: a stand-in for vLLM with a known optimum."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import planted_vllm
import pytest
from deadlines import PATIENCE_S

from holdfast.cli.main import main


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Forty requests a second for two seconds."""
    log = tmp_path / "traffic.jsonl"
    rows = [{"start_time": 100 + at / 40, "prompt_tokens": 30, "completion_tokens": 8} for at in range(80)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program called vllm, which is `planted_vllm`."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {planted_vllm.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def words(traffic: Path, *more: str) -> list[str]:
    known = ["tune", "smollm2", "--engine", "vllm", "--traffic", str(traffic), "--slo", "ttft.p90=10s,tpot.p90=30ms"]
    return [*known, "--trial", "0.5s", "--speed", "1", "--json", "--quiet", *more]


def of(found: dict[str, Any], settings: dict[str, object]) -> list[dict[str, Any]]:
    return [trial for trial in found["trials"] if trial["settings"] == settings]


@pytest.mark.usefixtures("vllm")
def test_a_short_run_keeps_the_default_and_tells_what_died(traffic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words(traffic, "--minutes", "0.08"))
    found = json.loads(capsys.readouterr().out)
    assert code == 1  # The default does not keep the SLO, and nothing better was proven.
    assert (found["verdict"], found["settings"], found["version"]) == ("not confirmed", {}, 1)
    assert found["command"] == "vllm serve smollm2"
    [default] = of(found, {})
    assert default["goodput"] < 0.1 * found["traffic"]["offered_per_s"]
    assert sum(one["count"] for one in found["pruned"]) > found["combinations"] / 2


@pytest.mark.usefixtures("vllm")
def test_nothing_is_kept_where_nothing_leaves_the_headroom(traffic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words(traffic, "--minutes", "0.05", "--headroom", "99.9%"))
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert code == 4
    assert (found["verdict"], found["settings"], found["command"]) == ("nothing keeps the headroom", None, None)
    assert found["error"]["code"] == "HF167"
    assert "of RAM with" in found["error"]["found"]
    assert found["trials"][0]["free_share"]["RAM"] < 0.999
    asked = [word for word in words(traffic, "--minutes", "0.05", "--headroom", "99.9%") if word != "--json"]
    assert main(asked) == 4
    told = capsys.readouterr()
    assert "nothing is kept" in told.out
    assert "vllm serve" not in told.out.splitlines()[-1]
    assert "[HF167]" in told.err
    assert " short, " in told.err


@pytest.mark.long
@pytest.mark.usefixtures("vllm")
def test_the_planted_optimum_is_found_and_proven(traffic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words(traffic, "--minutes", "3"))
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["settings"]["max_num_seqs"] in (16, 32)
    assert found["held"]
    died = [trial["died"] for trial in found["trials"] if trial["settings"].get("max_num_seqs") == planted_vllm.DIES]
    assert all("memory" in cause for cause in died)
    assert died


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_gives_what_is_known_so_far_and_keeps_it(traffic: Path, number: signal.Signals) -> None:
    kept = traffic.with_name("trials")
    command = [sys.executable, "-m", "holdfast", *words(traffic, "--minutes", "5", "--resume", str(kept))]
    command.remove("--quiet")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert run.stderr is not None
    while "search" not in (line := run.stderr.readline()):
        assert line, run.wait(PATIENCE_S)
    time.sleep(0.3)
    os.killpg(run.pid, number)
    said, progress = run.communicate(timeout=PATIENCE_S)
    found = json.loads(said)
    assert "the same command goes on" in progress
    assert len(kept.read_text().splitlines()) == 1 + len(found["trials"])
    assert run.returncode == 130
    assert found["interrupted"]
    assert len(found["trials"]) >= 2
    assert found["command"] == "vllm serve smollm2"


def test_what_cannot_be_tuned_is_refused(
    traffic: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(words(traffic)) == 2  # No vllm.
    assert "no program called vllm" in capsys.readouterr().out
    traffic.write_text('{"start_time": 1, "prompt_tokens": 9000, "completion_tokens": 8}\n')
    ours = ["tune", "smollm2", "--traffic", str(traffic), "--slo", "ttft=1s"]
    assert main(ours) == 2
    assert "a context of 8,192 tokens" in capsys.readouterr().err
    assert main(["tune", "http://127.0.0.1:8000", *ours[2:]]) == 2
    assert "holdfast bench http://127.0.0.1:8000" in capsys.readouterr().err
    assert main(["tune", "./no-such-model", *ours[2:]]) == 2
    assert main([*ours, "--kv-store", "/disk"]) == 2  # It could not be of use: nothing is known to be in common.
    assert "--prefix-tokens 1000" in capsys.readouterr().err
    nowhere = traffic / "kv"  # Below a file.
    assert main([*ours, "--prefix-tokens", "100", "--kv-store", str(nowhere)]) == 2
    said = capsys.readouterr().err
    assert "the stores of trials cannot be made" in said
    assert "Not a directory" in said
    for disk in ("--kv-store", "--nvme-path"):
        assert main([*ours, "--engine", "vllm", disk, "/disk"]) == 2
        assert f"leave {disk} out" in capsys.readouterr().err
    assert main([*ours, "--prefixes", "0"]) == 2
    assert main([*ours, "--serve-flags", "--kv-store /disk"]) == 2
    assert "would find them" in capsys.readouterr().err
    assert main([*ours, "--speed", "fast"]) == 2
    assert main([*ours, "--minutes", "0"]) == 2
    assert main(["tune", "smollm2", "--slo", "ttft=1s"]) == 2
    traffic.write_text('{"time": 1, "prompt_tokens": 9, "completion_tokens": 8}\n')
    for source in (str(traffic), "no/such/file"):  # The way out is another file: tune has no flags for a load.
        assert main(["tune", "smollm2", "--traffic", source, "--slo", "ttft=1s"]) == 2
        said = capsys.readouterr().err
        assert "access.log" in said
        assert "--concurrency" not in said
        assert "--rate" not in said
