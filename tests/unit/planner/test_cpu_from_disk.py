"""A CPU whose RAM does not hold a model: what is read from a disk, at most how fast, and the flag that allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError
from holdfast.planner.advice.throughput import EXPECTED, GB, NVME_GB_S
from holdfast.planner.api import plan
from holdfast.planner.report.text import lines


def test_a_plan_from_disk_says_so_and_how_fast_it_is_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.planner.api.disk_room", lambda folder, most: 1 << 40)
    found = plan("qwen3-0.6b", device="cpu", ram="1700MiB", nvme_path=str(tmp_path))
    assert found.fit.own is not None
    streamed = found.fit.own.streamed
    assert streamed is not None
    text = lines(found, width=300, brief=True)
    assert f"runs with {len(streamed.on_disk)} of 28 layers read from NVMe" in text[0]
    (said,) = (line for line in text if "limited by the disk" in line)
    speed = float(said.partition("at most about ")[2].partition(" ")[0])
    assert speed == pytest.approx(NVME_GB_S * GB * EXPECTED.link / streamed.read_bytes, rel=0.06)
    assert "(assumed)" in said
    without = plan("qwen3-0.6b", device="cpu", ram="1700MiB")
    assert not without.fits
    named = f"runs with {len(streamed.on_disk)} of 28 layers read from NVMe, given --nvme-path DIR"
    assert named in lines(without, width=400)[0]


def test_no_folder_is_named_where_none_would_do() -> None:
    assert plan("qwen3-0.6b", device="cpu", ram="64GiB").disk_would_do is None
    assert plan("qwen3-0.6b", device="cpu", ram="300MiB").disk_would_do is None


def test_a_size_without_a_folder_is_refused_as_serve_does() -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan("qwen3-0.6b", device="cpu", ram="1700MiB", nvme="40GiB")
    assert (caught.value.field, caught.value.fix) == ("nvme", "--nvme-path DIR")
