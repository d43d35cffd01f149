"""Which disk something lies on, from a simulated /sys."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.hardware.disks import whole_disk


def test_partitions_and_volumes_are_told_by_their_disk(tmp_path: Path) -> None:
    numbers, devices = tmp_path / "sys/dev/block", tmp_path / "sys/devices"
    numbers.mkdir(parents=True)
    disks, volumes = devices / "nvme0n1", devices / "virtual"
    places = {
        "259:0": disks, "259:1": disks / "nvme0n1p1", "259:2": disks / "nvme0n1p2", "259:5": devices / "nvme1n1",
        "253:0": volumes / "dm-0", "253:1": volumes / "dm-1", "9:0": volumes / "md0",
    }  # fmt: skip
    for number, place in places.items():
        place.mkdir(parents=True)
        (numbers / number).symlink_to(place)
        if place.name.startswith("nvme0n1p"):
            (place / "partition").write_text("1\n")
    for volume, below in {"253:0": ["259:2"], "253:1": ["253:0"], "9:0": ["259:0", "259:5"]}.items():
        (places[volume] / "slaves").mkdir()
        for number in below:
            (places[volume] / "slaves" / places[number].name).symlink_to(places[number])
    found = {number: whole_disk(os.makedev(*map(int, number.split(":"))), tmp_path) for number in places}
    one = {number for number, disk in found.items() if disk == str(disks)}
    assert one == {"259:0", "259:1", "259:2", "253:0", "253:1"}
    assert (found["259:5"], found["9:0"]) == (str(places["259:5"]), str(places["9:0"])), "a RAID is a disk of its own"
    assert whole_disk(os.makedev(0, 27), tmp_path) == "0:27", "no block device"
