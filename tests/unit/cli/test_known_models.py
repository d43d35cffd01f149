"""`holdfast models --known`: every shape that can be described has a number of parameters."""

from __future__ import annotations

import json

import pytest

from holdfast.cli.main import main


def test_no_known_shape_is_without_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--known", "--json"]) == 0
    rows = {row["name"]: row["parameters"] for row in json.loads(capsys.readouterr().out)}
    assert [name for name, count in rows.items() if not count] == []
    assert rows["qwen3-30b-a3b-fp8"] == rows["qwen3-30b-a3b"]
    assert rows["qwen2.5-72b-awq"] > rows["qwen2.5-72b"], "its layers were padded when it was quantized"
