"""The one reader of foreign JSON: every bad file ends in a CheckpointError, and good ones are read as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.checkpoints.bounded_files import (
    MAX_JSON_DIGITS,
    OutsideError,
    open_file,
    parse_table,
    read_json,
    read_small,
)
from holdfast.config.setting import listed, table
from holdfast.errors import CheckpointError, ConfigurationError

BAD = {
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "digits that Python reads": b'{"a": -' + b"9" * (MAX_JSON_DIGITS + 1) + b"}",
    "depth": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "torn": b'{"a": 1',
    "no table": b"[1]",
    "not UTF-8": b'{"a": "\xff"}',
    "many tables": b'{"a": [' + b"[]," * (1 << 20) + b"[]]}",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(BAD[name])
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert len(str(caught.value)) < 1000


def test_what_configs_really_hold_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656, "limit": [0.0, Infinity], "a": 1, "a": 2}')
    assert read_json(path) == {"model_max_length": 10**30 + 19884624838656, "limit": [0.0, float("inf")], "a": 2}
    digits = "7" * 5000
    assert parse_table(f'{{"text": "{digits}", "number": 0.{digits}, "whole": 12}}'.encode(), "x")["text"] == digits


def test_no_link_leads_out_of_the_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("{}")
    (inside / "own").write_text("{}")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "near").symlink_to(inside / "own")
    (inside / "folder").symlink_to(outside)
    allowed = [inside.resolve()]
    assert read_small(inside / "own", within=allowed) == read_small(inside / "near", within=allowed) == b"{}"
    assert read_small(inside / "link") == b"{}"  # Of a folder that its user named, links are followed.
    for name in ("link", "folder/secret"):
        with pytest.raises(OutsideError):
            read_small(inside / name, within=allowed)
    open_now = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(OutsideError):
            open_file(inside / "link", allowed)
        with pytest.raises(CheckpointError):
            open_file(outside, None)
    assert len(os.listdir("/proc/self/fd")) == open_now


def test_depth_in_a_setting_is_refused_too() -> None:
    for parse in (listed, table):
        with pytest.raises(ConfigurationError):
            parse("field", "[" * 100_000)
