"""Models whose files lie: a start takes them, or refuses them with a typed error, within bounds of memory and time.

Counts, offsets, lengths, types, overlaps, torn files, paths out of the folder, JSON of every bad kind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hostile_files as files
import pytest
from hostile_json import spoiled_bytes
from limits import Limited

from holdfast.models import catalogue

LOAD = "hostile_loads:load_model"


@pytest.fixture(scope="module")
def load():
    with Limited(LOAD) as limited:
        yield limited


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    folder.mkdir()
    files.write_good_folder(folder)
    return folder


def test_what_is_spoiled_here_is_good_at_first(load: Limited, good: Path, tmp_path: Path) -> None:
    ending = load(str(good))
    assert ending.kind == "returned", ending.detail
    told = json.loads(ending.detail)
    assert told["read"] == files.data_size(files.tensor_shapes())
    (tmp_path / "good.gguf").write_bytes(files.good_gguf().encode())
    ending = load(str(tmp_path / "good.gguf"))
    assert ending.kind == "returned", ending.detail
    assert json.loads(ending.detail)["ids_end"] == 300


def fuzz_folders(cases, load: Limited, good: Path, tmp_path: Path, count: int = 220) -> None:
    refused = 0
    for name, random in cases(count):
        folder = tmp_path / "case"
        shutil.copytree(good, folder)
        files.spoil_folder(folder, random)
        ending = load(str(folder))
        assert ending.good, f"{name}: {ending.kind}\n{ending.detail}"
        refused += ending.kind == "refused"
        shutil.rmtree(folder)
    assert refused > 10  # Else nothing was spoiled.


def fuzz_gguf(cases, load: Limited, tmp_path: Path, count: int = 220) -> None:
    refused = 0
    for name, random in cases(count):
        path = tmp_path / "case.gguf"
        path.write_bytes(files.spoiled_gguf(random))
        ending = load(str(path))
        assert ending.good, f"{name}: {ending.kind}\n{ending.detail}"
        refused += ending.kind == "refused"
    assert refused > 10


def fuzz_configs(cases, tmp_path: Path, count: int = 300) -> None:
    """Of every known family, without weights."""
    refused, known = 0, catalogue.entries()
    with Limited("hostile_loads:describe_folder") as describe:
        for name, random in cases(count):
            entry = random.choice(known)
            (tmp_path / "config.json").write_bytes(spoiled_bytes(dict(entry.config), random, tuple(files.SIZES)))
            ending = describe(str(tmp_path))
            assert ending.good, f"{name}, {entry.name}: {ending.kind}\n{ending.detail}"
            refused += ending.kind == "refused"
    assert refused > 10


def test_folders(cases, load, good, tmp_path) -> None:
    fuzz_folders(cases, load, good, tmp_path)


def test_gguf_files(cases, load, tmp_path) -> None:
    fuzz_gguf(cases, load, tmp_path)


def test_configs(cases, tmp_path) -> None:
    fuzz_configs(cases, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_configs_for_long(cases, tmp_path) -> None:
    fuzz_configs(cases, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_folders_for_long(cases, load, good, tmp_path) -> None:
    fuzz_folders(cases, load, good, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_gguf_files_for_long(cases, load, tmp_path) -> None:
    fuzz_gguf(cases, load, tmp_path)
