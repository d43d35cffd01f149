"""`holdfast list`, `show` and `rm`: what is on this machine, in the hub's cache and in ours."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoints.sources import stored_models as stored
from holdfast.cli.commands.stored import rm
from holdfast.cli.main import main
from holdfast.cli.servers.registry import STARTING, Registration, RunningServer


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "holdfast"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def add(hub: Path, repository: str, files: dict[str, bytes], *, commit: str = "c0ffee") -> Path:
    """A repository in the hub's cache."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for place in (snapshot, folder / "blobs", folder / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for number, (name, content) in enumerate(files.items()):
        blob = folder / "blobs" / f"{len(content)}-{number}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return folder


@pytest.fixture
def models(caches: Path, model_folder: Callable[..., Path], good_gguf: bytes) -> dict[str, Path]:
    files = {path.name: path.read_bytes() for path in model_folder().iterdir()}
    files["README.md"] = b"---\nlicense: apache-2.0\n---\n# Model\n"
    ggufs = {"m-Q4_K_M.gguf": good_gguf, "m-Q8_0.gguf": good_gguf + bytes(32)}
    broken = add(caches / "hub", "owner/broken", {"config.json": b"{}", "model.safetensors": b"x"})
    (broken / "blobs" / "1-1").unlink()
    return {
        "owner/plain": add(caches / "hub", "owner/plain", files),
        "owner/ggufs": add(caches / "hub", "owner/ggufs", ggufs),
        "owner/broken": broken,
    }


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_models_are_listed_with_format_size_and_last_use(
    models: dict[str, Path], caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = caches / "mine-Q5_K_M.gguf"
    mine.write_bytes(bytes(100))
    stored.mark_used(mine)
    rows = listed(capsys)
    assert set(rows) == {"owner/plain", "owner/ggufs:Q4_K_M", "owner/ggufs:Q8_0", "owner/broken", str(mine)}
    assert rows["owner/plain"]["format"] == "safetensors F32"
    assert rows["owner/ggufs:Q8_0"]["format"] == "GGUF Q8_0"
    assert rows["owner/ggufs:Q8_0"]["size_bytes"] == rows["owner/ggufs:Q4_K_M"]["size_bytes"] + 32
    assert not rows["owner/broken"]["complete"]
    assert (rows[str(mine)]["kind"], rows[str(mine)]["size_bytes"]) == ("path", 100)
    assert next(iter(rows)) == str(mine)  # The last used is the first.
    assert main(["list", "GGUFS"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["NAME", "FORMAT", "SIZE", "LAST", "USED", "WHERE"]
    assert len(table) == 3
    assert "\x1b" not in "".join(table)


def test_nothing_here_says_how_to_begin(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "holdfast pull smollm2" in capsys.readouterr().out


def test_one_gguf_of_several_is_removed_alone(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], good_gguf: bytes
) -> None:
    assert main(["rm", "owner/ggufs"]) == 1
    assert "holdfast rm owner/ggufs:Q" in capsys.readouterr().err
    assert main(["rm", "owner/ggufs:Q4_K_M", "--yes"]) == 0
    assert f"{len(good_gguf)} B freed" in capsys.readouterr().out
    assert len(list((models["owner/ggufs"] / "blobs").iterdir())) == 1
    rows = listed(capsys)
    assert "owner/ggufs" in rows
    assert rows["owner/ggufs"]["complete"]


@pytest.mark.parametrize("linked", ["the file", "the blob", "the folder of blobs"])
def test_a_file_outside_the_cache_stays(
    models: dict[str, Path], caches: Path, capsys: pytest.CaptureFixture[str], good_gguf: bytes, linked: str
) -> None:
    repository, elsewhere = models["owner/ggufs"], caches / "elsewhere"
    link = repository / "snapshots" / "c0ffee" / "m-Q4_K_M.gguf"
    blob = link.resolve()
    if linked == "the folder of blobs":
        blob.parent.rename(elsewhere)
        blob.parent.symlink_to(elsewhere)
        kept = elsewhere / blob.name
    else:
        elsewhere.mkdir()
        kept = blob.rename(elsewhere / "mine.gguf")
        place = link if linked == "the file" else blob
        place.unlink(missing_ok=True)
        place.symlink_to(kept)
    assert main(["rm", "owner/ggufs:Q4_K_M", "--yes"]) == 0
    assert "Q4_K_M: 0 B freed" in capsys.readouterr().out
    assert kept.read_bytes() == good_gguf
    assert not link.is_symlink()
    assert linked != "the blob" or not blob.is_symlink()
    assert (link.parent / "m-Q8_0.gguf").exists()


def test_removing_asks_and_frees_what_it_says(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["rm", "owner/plain"]) == 2  # Nobody is there to be asked.
    assert "--yes" in capsys.readouterr().err
    assert models["owner/plain"].exists()
    assert main(["rm", "owner/nobody", "--yes"]) == 1
    assert main(["rm", "owner/plain", "owner/nobody", "--yes"]) == 1  # All or nothing.
    assert models["owner/plain"].exists()
    size = listed(capsys)["owner/plain"]["size_bytes"]
    assert main(["rm", "owner/plain", "--yes"]) == 0
    assert "freed" in capsys.readouterr().out
    assert size > 0
    assert not models["owner/plain"].exists()


def served(path: Path) -> Registration:
    created_s = psutil.Process().create_time()
    return Registration(
        RunningServer(pid=os.getpid(), created_s=created_s, url="http://127.0.0.1:1", port=1, path=str(path))
    )


def test_a_server_that_begins_while_rm_asks_keeps_its_files(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Registration] = []

    def confirmed(model: stored.StoredModel) -> bool:
        held.append(served(model.path))
        return True

    monkeypatch.setattr(rm, "_confirmed", confirmed)
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["rm", "owner/plain"]) == 2
    held[0].remove()
    assert (models["owner/plain"] / "refs" / "main").exists()


def test_nothing_is_deleted_while_a_server_is_being_started(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    free: list[bool] = []

    def deleted(path: Path) -> None:
        with open(caches / "run" / STARTING) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free.append(False)

    monkeypatch.setattr(rm, "_delete", deleted)
    assert main(["rm", "owner/plain", "--yes"]) == 0
    assert free == [False]


def test_what_is_served_or_not_ours_is_not_removed(
    models: dict[str, Path], caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = caches / "mine.gguf"
    mine.write_bytes(b"GGUF")
    stored.mark_used(mine)
    assert main(["rm", str(mine), "--yes"]) == 2
    assert mine.exists()
    snapshot = models["owner/plain"] / "snapshots" / "c0ffee"
    held = served(snapshot)
    try:
        assert main(["rm", "owner/plain", "--yes"]) == 2
        assert f"holdfast stop {os.getpid()}" in capsys.readouterr().err
        assert listed(capsys)["owner/plain"]["served_at"] == ["http://127.0.0.1:1"]
    finally:
        held.remove()
    assert snapshot.exists()


def test_show_tells_what_a_model_is(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "owner/plain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = {"architecture": "LlamaForCausalLM", "context": 64, "license": "apache-2.0", "format": "safetensors"}
    assert {name: found[name] for name in expected} == expected
    assert found["quantization"] == "float32"
    assert found["parameters"] > 0
    assert found["fits"]["fits"]
    assert main(["show", "owner/plain"]) == 0
    said = capsys.readouterr().out
    assert "none: serve it with --chat-template" in said
    assert "fits here" in said
    assert main(["show", "owner/plain", "--template"]) == 2
    assert main(["show", "qwen3:0.6b", "--json"]) == 0  # Of the catalogue.
    assert json.loads(capsys.readouterr().out)["here"] is False
    assert main(["show", "nobody-knows-this", "--json"]) == 2
