"""`holdfast kv-store`: what is in a store is listed, proven and pruned, also while a server uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import PATIENCE_S
from prefix_pages import PAGE_BYTES, FailingCalls, file_of, key_of, opened, put, served, until

from holdfast.cli.commands.stored import kv_store
from holdfast.cli.main import main
from holdfast.prefix_store import store

KEYS = [key_of(number) for number in range(8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight pages of one model, used ten days ago, and four of another, used now."""
    calls = FailingCalls()
    calls.ahead_s = -10 * 86400.0
    for model, label, keys, one in ((b"a", "llama-3.1-8b bf16", KEYS, calls), (b"b", "qwen\x1b[2J", KEYS[:4], None)):
        store = opened(tmp_path / "store", model=model, label=label, calls=one)
        for key in keys:
            put(store, [key], model=model)
        store.close(PATIENCE_S)
    return tmp_path / "store"


def pages_left(folder: Path) -> dict[bytes, int]:
    found = {}
    for model in (b"a", b"b"):
        store = opened(folder, model=model)
        found[model] = len(served(store, KEYS, model=model))
        store.close(PATIENCE_S)
    return found


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "ls", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "llama-3.1-8b bf16  8.00 KiB  8      64.00 KiB  10 days ago" in said
    assert "qwen\\x1b[2J" in said
    assert "\x1b" not in said
    assert "96.00 KiB in all; " in said
    server = opened(folder, model=b"b")
    assert main(["kv-store", "ls", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    server.close(PATIENCE_S)
    assert listed["total_bytes"] == 12 * PAGE_BYTES
    assert {(one["label"], one["pages"], one["in_use"]) for one in listed["models"]} == {
        ("llama-3.1-8b bf16", 8, False),
        ("qwen\x1b[2J", 4, True),
    }


def test_verify_finds_damaged_pages_and_forgets_them_when_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv-store", "verify", str(folder)]) == 0
    (largest,) = [file for file in folder.glob("*.pages") if file.stat().st_size == 8 * PAGE_BYTES]
    with largest.open("r+b") as file:
        file.seek(5 * PAGE_BYTES + 100)
        file.write(b"?")
    os.truncate(largest, 7 * PAGE_BYTES + 50)
    capsys.readouterr()
    for _ in range(2):  # Nothing is changed by looking.
        assert main(["kv-store", "verify", str(folder), "--json"]) == 1
        verified = json.loads(capsys.readouterr().out)
        assert verified["bad"] == 2
        assert {(one["pages"], one["good"], one["bad"]) for one in verified["models"]} == {(8, 6, 2), (4, 4, 0)}
    assert main(["kv-store", "verify", str(folder), "--forget"]) == 1
    assert "2 damaged pages forgotten" in capsys.readouterr().out
    assert main(["kv-store", "verify", str(folder)]) == 0
    assert pages_left(folder) == {b"a": 6, b"b": 4}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--size", "48KiB"], {b"a": 2, b"b": 4}),
        (["--older-than", "7d"], {b"a": 0, b"b": 4}),
        (["--older-than", "11d"], {b"a": 8, b"b": 4}),
        (["--model", "LLAMA"], {b"a": 0, b"b": 4}),
        (["--model", "llama", "--older-than", "11d"], {b"a": 8, b"b": 4}),
        (["--model", "qwen", "--size", "1MiB"], {b"a": 8, b"b": 4}),
        (["--model", "qwen", "--size", "80KiB"], {b"a": 8, b"b": 2}),
        (["--model", "qwen", "--size", "0"], {b"a": 8, b"b": 0}),
        (["--older-than", "7d", "--size", "72KiB"], {b"a": 5, b"b": 4}),
        (["--older-than", "11d", "--size", "48KiB"], {b"a": 8, b"b": 4}),
        (["--older-than", "1h", "--size", "1MiB"], {b"a": 8, b"b": 4}),
        (["--all"], {b"a": 0, b"b": 0}),
        (["--size", "0"], {b"a": 0, b"b": 0}),
        (["--older-than", "0"], {b"a": 0, b"b": 0}),
    ],
)
def test_prune(folder: Path, words: list[str], left: dict[bytes, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "prune", str(folder), *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    expected = sum(left.values())
    assert said == {
        "pages": 12 - expected, "freed_bytes": (12 - expected) * PAGE_BYTES, "left_bytes": expected * PAGE_BYTES
    }  # fmt: skip
    # A file whose blocks lie apart has another one, for the list of them.
    taken = sum(max(0, file.stat().st_blocks * 512 - 4096) for file in folder.glob("*.pages"))
    assert taken <= expected * PAGE_BYTES
    assert pages_left(folder) == left


def test_prune_while_a_server_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "TELL_RATES_BEATS", 1 << 30)  # Else it looks anyway, now and then.
    server = opened(folder, model=b"a")
    assert server.has(KEYS) == 8
    assert server.stats().total_bytes == 12 * PAGE_BYTES
    assert main(["kv-store", "prune", str(folder), "--model", "qwen"]) == 0
    until(lambda: server.stats().total_bytes == 8 * PAGE_BYTES)
    assert main(["kv-store", "prune", str(folder), "--all"]) == 0
    assert "8 pages removed, 64.00 KiB freed, 0 B left" in capsys.readouterr().out
    until(lambda: server.stats().total_bytes == 0)
    assert served(server, KEYS, model=b"a") == []
    until(lambda: server.has(KEYS) == 0)
    assert all(put(server, KEYS, model=b"a"))
    assert served(server, KEYS, model=b"a") == KEYS
    file_of(folder, "index")  # The other model's files are gone, the server's are not.
    server.close(PATIENCE_S)


def test_no_store_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["kv-store", "ls", str(folder)]) == 2
        assert "HF182" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--all", "--size", "1GiB"], ["--size", "much"], ["--older-than", "long"]])
def test_prune_that_is_not_clear_removes_nothing(folder: Path, words: list[str]) -> None:
    assert main(["kv-store", "prune", str(folder), *words]) == 2
    assert pages_left(folder) == {b"a": 8, b"b": 4}


@pytest.mark.parametrize(
    ("words", "doubt", "fix"),
    [
        (["--size", "20"], "--size: '20' is not valid: 20 bytes?", "--size 20GiB"),
        (["--size", "20.5"], "--size: '20.5' is not valid: 20 bytes?", "--size 20.5GiB"),
        (["--size", "0.5"], "--size: '0.5' is not valid: 0 bytes?", "--size 0.5GiB"),
        (["--size", "0.0000000001GiB"], "--size: '0.0000000001GiB' is not valid: 0 bytes?", "--size 22GiB"),
        (["--older-than", "7"], "--older-than: '7' is not valid: 7 seconds?", "--older-than 7d"),
    ],
)
def test_a_number_without_its_unit_removes_nothing(
    folder: Path, words: list[str], doubt: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv-store", "prune", str(folder), *words]) == 2
    said = capsys.readouterr().err
    assert doubt in said
    assert f"fix:    {fix}\n" in said
    assert pages_left(folder) == {b"a": 8, b"b": 4}


def test_a_model_that_is_not_there_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "prune", str(folder), "--model", "mistral", "--size", "0"]) == 1
    said = capsys.readouterr()
    assert "no model in the KV store has 'mistral' in its name" in said.err
    assert "llama-3.1-8b bf16" in said.err
    assert said.out == ""
    assert pages_left(folder) == {b"a": 8, b"b": 4}


def test_mistakes_are_answered_with_commands_that_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "ls"]) == 2
    assert "see holdfast kv-store ls --help" in capsys.readouterr().err
    assert main(["kv-store", "prune", str(folder), "--all", "--model", "llama 3"]) == 2
    assert f"holdfast kv-store prune {folder} --model 'llama 3'\n" in capsys.readouterr().err


def test_a_bar_where_it_takes_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_store, "BAR_AFTER_S", PATIENCE_S)
    assert main(["kv-store", "verify", str(folder)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(kv_store, "BAR_AFTER_S", 0.0)
    assert main(["kv-store", "verify", str(folder)]) == 0
    assert "verify: 100% of 96.00 KiB" in capsys.readouterr().err


def test_torch_is_not_imported(folder: Path) -> None:
    code = "import sys; from holdfast.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "kv-store", "verify", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
