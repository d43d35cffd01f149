"""`holdfast plan --nvme-path DIR`: the placement of `serve`, the room that is there, the same refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.planner import api
from holdfast.planner.fit.placement import Placement
from holdfast.planner.fit.search import fit
from holdfast.planner.serve.streamed import with_streamed_layers

MODEL = "llama-3.1-8b"


def test_a_cpu_reads_the_layers_from_the_folder_that_a_server_would_read(tmp_path: Path) -> None:
    asked = {"device": "cpu", "ram": "10GiB", "max_model_len": 2048, "nvme_path": str(tmp_path)}
    found = api.plan(MODEL, **asked)
    assert found.fits
    question = found.fit.question
    whole = fit(replace(question, settings=replace(question.settings, streamed_layers=0)))
    assert not whole.fits
    served = with_streamed_layers(whole, EngineConfig.from_arguments(**asked))
    assert served.engine.streamed is not None
    assert served.engine.streamed == found.fit.engine.streamed
    assert served.engine.blocks == found.fit.engine.blocks
    assert f"--nvme-path {tmp_path}" in found.commands["holdfast"].text
    assert list(found.commands) == ["holdfast"], "nobody else reads layers from a disk"
    assert found.throughput is None
    assert not api.plan(MODEL, **(asked | {"nvme_path": None})).fits
    assert not api.plan(MODEL, engine="vllm", **asked).fits
    assert not api.plan(MODEL, **asked, nvme="1GiB").fits


def test_a_gpu_gets_the_same_placement_by_folder_and_by_size(tmp_path: Path) -> None:
    asked = {"gpu": "rtx4090", "ram": "24GiB", "nvme": "30GiB", "max_model_len": 2048}
    by_size, by_folder = (
        api.plan("llama-3.1-70b-awq", **asked),
        api.plan("llama-3.1-70b-awq", **asked, nvme_path=str(tmp_path)),
    )
    assert by_size.offload is not None
    assert by_folder.offload is not None
    assert by_folder.offload.verdict == by_size.offload.verdict
    assert any(one.field == "nvme" and str(tmp_path) in one.reason for one in by_folder.decisions)


def test_a_folder_that_is_not_there_is_refused_as_by_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        api.plan(MODEL, gpu="rtx4090", nvme_path=str(tmp_path / "nowhere"))
    assert caught.value.field == "nvme_path"
    assert str(caught.value.fix).startswith("mkdir -p")


def test_the_price_of_kv_is_that_of_the_disk_where_it_takes_the_layers() -> None:
    machine = {"gpu": "rtx4090", "ram": "16GiB", "nvme": "1TB"}
    found = api.plan("llama-3.1-70b-awq", **machine)
    assert found.offload is not None
    assert isinstance(found.offload.placement, Placement)
    before = found.offload.placement
    after = api.plan("llama-3.1-70b-awq", **machine, gpu_layers=before.resident - 6).offload
    assert after is not None
    assert isinstance(after.placement, Placement)
    assert len(after.placement.streamed.on_disk) == len(before.streamed.on_disk) + 6
    assert found.offload.throughput is not None
    assert after.throughput is not None
    speeds = [one.one.estimate.tokens_per_s for one in (found.offload.throughput, after.throughput)]
    price = f"6 more layers streamed, 6 of them from NVMe: {1 - speeds[1] / speeds[0]:.0%} fewer tokens/s"
    assert price in str(found.offload.price)
    in_ram = api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="64GiB", nvme="1TB").offload
    assert in_ram is not None
    assert str(in_ram.price).endswith("6 more layers streamed, 13% more bytes a step")


def test_a_disk_that_was_limited_is_limited_in_the_command_too(tmp_path: Path) -> None:
    on_gpu = {"gpu": "rtx4090", "ram": "16GiB"}
    limited = api.plan("llama-3.1-70b-awq", **on_gpu, nvme="9GiB", nvme_path=str(tmp_path))
    assert limited.offload is not None
    assert limited.offload.command.text.endswith(f"--nvme-path {tmp_path} --nvme 9GiB")
    by_size = api.plan("llama-3.1-70b-awq", **on_gpu, nvme="9GiB").offload
    assert by_size is not None
    assert by_size.command.text.endswith("--nvme-path DIR --nvme 9GiB")
    open_ended = api.plan("llama-3.1-70b-awq", **on_gpu, nvme_path=str(tmp_path)).offload
    assert open_ended is not None
    assert open_ended.command.text.endswith(f"--nvme-path {tmp_path}"), "what is free there, as of a server"
    on_cpu = {"device": "cpu", "ram": "10GiB", "max_model_len": 2048, "nvme_path": str(tmp_path)}
    assert api.plan(MODEL, **on_cpu, nvme="20GiB").commands["holdfast"].text.endswith("--nvme 20GiB")


def test_kv_that_ram_and_disk_leave_no_room_for_has_no_price_but_what_they_lack() -> None:
    machine = {"gpu": "rtx4090", "ram": "16GiB", "nvme": "9GiB"}
    full = api.plan("llama-3.1-70b-awq", **machine).offload
    assert full is not None
    assert full.price == "8,192 tokens more of KV: 6 more layers streamed, for which the disk is 2.48 GiB short"
    without_disk = api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="24.5GiB").offload
    assert without_disk is not None
    assert without_disk.runs
    assert str(without_disk.price).endswith("6 more layers streamed, for which RAM is 2.14 GiB short")


def test_a_remedy_names_the_folder_that_was_given(tmp_path: Path) -> None:
    asked = {"gpu": "rtx4090", "ram": "16GiB", "nvme": "9GiB"}
    named, open_ended = (
        next(way for way in api.plan("llama-3.1-70b-awq", **asked, nvme_path=folder).ways_out if way.kind == "tiers")
        for folder in (str(tmp_path), None)
    )
    assert str(named.note).endswith(f"given --nvme-path {tmp_path}")
    assert str(open_ended.note).endswith("given --nvme-path DIR, a folder on that disk")


def test_a_disk_that_the_plan_does_not_use_is_said(tmp_path: Path) -> None:
    unused = "not used by this plan"
    fits = str(api.plan(MODEL, gpu="rtx4090", quantization="int4", nvme="9GiB"))
    assert f"NVMe: 9.00 GiB, {unused}" in fits
    in_ram = str(api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="64GiB", nvme="9GiB"))
    assert f"NVMe: 9.00 GiB, {unused}" in in_ram
    several = str(api.plan("llama-3.1-70b-awq", gpu="rtx4090x2", nvme="9GiB"))
    assert f"NVMe: 9.00 GiB, {unused}" in several
    assert unused not in str(api.plan("llama-3.1-70b-awq", gpu="rtx4090", ram="24GiB", nvme="9GiB"))
    on_cpu = {"device": "cpu", "max_model_len": 2048, "nvme_path": str(tmp_path)}
    assert unused not in str(api.plan(MODEL, **on_cpu, ram="10GiB"))
    assert unused in str(api.plan(MODEL, **on_cpu, ram="40GiB"))
