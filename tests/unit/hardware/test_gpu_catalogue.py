"""The GPU catalogue: enough of them, each whole and plausible, found under every name, refused with the nearest."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from whole_tables import check_rows

from holdfast.errors import ConfigurationError
from holdfast.hardware import gpus
from holdfast.units import GIB, MIB


def test_there_are_enough_and_of_every_kind() -> None:
    known = gpus.entries()
    assert len(known) >= 150
    assert len({gpu.key for gpu in known}) == len(known)
    for vendor, least in (("nvidia", 90), ("amd", 25), ("intel", 10), ("apple", 30)):
        assert sum(gpu.vendor == vendor for gpu in known) >= least
    capabilities = {gpu.compute_capability for gpu in known if gpu.vendor == "nvidia"}
    assert {(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)} <= capabilities


def test_an_entry_is_whole_and_plausible() -> None:
    def check(gpu: gpus.Gpu) -> None:
        assert gpu.source.startswith("https://")
        assert 0.6 * gpu.memory_bytes < gpu.usable_bytes <= gpu.memory_bytes + GIB
        if not gpu.unified:
            assert gpu.usable_bytes > 0.9 * gpu.memory_bytes
        assert 50 <= gpu.bandwidth_gb_s <= 10_000
        assert 1 <= gpu.half_tflops <= 3_000
        # An H20 has 148 TFLOP/s beside 4 TB/s and a Jetson Thor 258 beside 0.27: beyond these a digit is wrong.
        assert 5 < 1000 * gpu.half_tflops / gpu.bandwidth_gb_s < 1000
        assert gpu.fp8_tflops is None or 0.99 < gpu.fp8_tflops / gpu.half_tflops < 2.03
        assert (gpu.compute_capability is None) == (gpu.vendor != "nvidia")
        if gpu.compute_capability is not None:
            assert gpu.bf16 == (gpu.compute_capability >= (8, 0))
            assert gpu.fp8 == (gpu.compute_capability >= (8, 9))
        assert gpu.unified == (gpu.host_link.name == "shared memory, no copy")
        assert gpu.unified or gpu.host_link.gb_s > 5
        assert gpu.peer_link is None or gpu.peer_link.gb_s > 20

    check_rows(gpus.entries(), check, lambda gpu: gpu.key)


def test_every_name_of_an_entry_finds_it() -> None:
    def check(gpu: gpus.Gpu) -> None:
        for name in (gpu.key, gpu.name, *gpu.aliases):
            assert gpus.find(name) is gpu
            assert gpus.find(name.upper()) is gpu
            assert gpus.find_group(name) == gpus.Gpus(gpu, 1)
            assert gpus.find_group(f"{name}x2") == gpus.Gpus(gpu, 2)
            assert gpus.find_group(f"8 x {name}") == gpus.Gpus(gpu, 8)

    check_rows(gpus.entries(), check, lambda gpu: gpu.key)


@pytest.mark.parametrize(
    ("name", "usable_mib"),
    [
        ("rtx4090", 24207),
        ("4090", 24207),
        ("3060 Ti", 8069),
        ("rtx4090-laptop", 16128),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16128),
        ("RTX 4090", 24207),
        ("NVIDIA GeForce RTX 4090", 24207),
        ("RTX-3090", 24258),
        ("rtx 5090", 32122),
        ("a100-40", 40448),
        ("A100 80GB PCIe", int(0.99 * 81920)),
        ("NVIDIA A100-SXM4-80GB", 81152),
        ("h100-80", 81008),
        ("H100 80GB", 81008),
        ("NVIDIA H100 NVL", 95232),
        ("h200", 143155),
        ("NVIDIA H200", 143155),
        ("b200", int(0.99 * 183359)),
        ("l4", int(0.985 * 23034)),
        ("NVIDIA L40S", 45598),
        ("Tesla T4", 14909),
        ("Tesla V100-SXM2-32GB", int(0.99 * 32768)),
        ("mi300x", 196592),
        ("AMD Instinct MI300X", 196592),
        ("7900xtx", None),
        ("rx 7900 xtx", 24560),
        ("m2-ultra-192", 147456),
        ("Apple M2 Ultra 192GB", 147456),
    ],
)
def test_what_people_and_drivers_write(name: str, usable_mib: int | None) -> None:
    if usable_mib is None:
        with pytest.raises(ConfigurationError, match="rx7900xtx"):
            gpus.find(name)
    else:
        assert gpus.find(name).usable_bytes == usable_mib * MIB


def test_usable_is_what_cuda_shows_and_not_what_nvidia_smi_does() -> None:
    """torch's total of a 4090 is 23.64 GiB, where nvidia-smi says 24,564 MiB; ECC on the server cards takes more."""
    assert gpus.find("rtx4090").usable_bytes / GIB == pytest.approx(23.64, abs=0.01)
    assert gpus.find("rtx3090").usable_bytes / GIB == pytest.approx(23.69, abs=0.01)
    for gpu in gpus.entries():
        if gpu.vendor == "nvidia" and not gpu.unified:
            assert gpu.usable_bytes < 0.996 * gpu.memory_bytes, gpu.key


@pytest.mark.parametrize("name", ["gb10", "dgx-spark", "jetson-orin-64", "m4-max-128", "strix-halo", "mi300a"])
def test_unified_memory_is_said(name: str) -> None:
    assert gpus.find(name).unified


def test_a_gh200_has_memory_of_its_own_and_a_fast_link() -> None:
    gpu = gpus.find("gh200")
    assert not gpu.unified
    assert gpu.host_link.gb_s == 450


@pytest.mark.parametrize(
    ("text", "key", "count"),
    [
        ("h100-80x2", "h100-80", 2),
        ("H100-80 x 8", "h100-80", 8),
        ("4x rtx4090", "rtx4090", 4),
        ("mi300x", "mi300x", 1),
        ("mi300xx8", "mi300x", 8),
        ("rtx3090*2", "rtx3090", 2),
        ("rx9070xtx2", "rx9070xt", 2),
    ],
)
def test_a_number_of_gpus(text: str, key: str, count: int) -> None:
    found = gpus.find_group(text)
    assert (found.gpu.key, found.count) == (key, count)


@pytest.mark.parametrize("text", ["h100-80x0", "0x h100-80", "rtx4090x1025", "rtx4090x999999999"])
def test_an_absurd_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        gpus.find_group(text)
    assert refused.value.code == gpus.WRONG_COUNT


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("rtx4091", "rtx4090"), ("h100-81", "h100-80"), ("m2-ultr", "m2-ultra-64"), ("a100-8", "a100-80")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        gpus.find(name)
    assert refused.value.code == gpus.UNKNOWN_GPU
    assert nearest in str(refused.value.needed)
    assert isinstance(refused.value, ValueError)
    with pytest.raises(ConfigurationError, match=nearest):
        gpus.find_group(f"{name}x2")


@pytest.mark.parametrize("name", ["", " ", "x2", "x", "2x", "\0", "ü" * 10_000, "9" * 100_000, "rtx4090x" * 5_000])
def test_a_hostile_name_is_refused_shortly(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        gpus.find_group(name)
    assert len(str(refused.value)) < 700


def test_the_file_holds_no_field_that_is_not_read() -> None:
    data = tomllib.loads(Path(gpus.__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    fields = {"name", "aliases", "memory_gib", "usable_mib", "usable_estimated", "bandwidth_gb_s", "half_tflops"}
    fields |= {"fp8_tflops", "compute_estimated", "compute_capability", "bf16", "host_link", "peer_link", "unified"}
    fields |= {"gpus", "sizes", "vendor", "source"}
    rows = [
        *data["families"].values(),
        *(row for family in data["families"].values() for row in family["gpus"].values()),
    ]
    for row in rows:
        assert set(row) <= fields
    assert {row[link] for row in rows for link in _links(row)} == set(data["links"])


def _links(row: dict[str, object]) -> list[str]:
    return [link for link in ("host_link", "peer_link") if link in row]


def test_nothing_is_read_before_it_is_asked_for() -> None:
    code = "import sys, holdfast.hardware.gpus as g; sys.exit(g._catalogue.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
