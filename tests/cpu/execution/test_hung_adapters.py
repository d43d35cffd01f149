"""Adapter files that do not come, as of a file server that is gone: they hold up nobody else's, and write nowhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deadlines import PATIENCE_S
from lora_adapters import write_adapter

from holdfast.checkpoints import locate, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.lora.adapter import stamp
from holdfast.execution.lora import bounded_reads, slots
from holdfast.execution.lora.slots import AdapterPlaces, LoraLimits
from holdfast.records import AdapterArrival, AdapterFetch, AdapterRef, StepPlan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    settings = json.loads((tiny_model / "config.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).float()
    model.save_pretrained(base / "model")
    for seed, name in enumerate(("good", "hung-1", "hung-2", "hung-3")):
        write_adapter(base / name, base / "model", seed=seed)
    return base


class FileServer:
    """Files of adapters called hung do not come until `come` is set. Its clock is that of the reads."""

    def __init__(self) -> None:
        self.come, self.now_s = threading.Event(), 0.0
        self.begun = self.hung = 0
        self._others = set(threading.enumerate())
        """This one, and those that an earlier test has left behind: they may look at the clock, and read on."""

    def serves_this_thread(self) -> bool:
        return threading.current_thread() not in self._others

    def monotonic(self) -> float:
        self.begun += self.serves_this_thread()
        return self.now_s


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    made, read = FileServer(), Checkpoint.read

    def waiting(self: Checkpoint, name: str, **named: Any) -> Any:
        if "hung" in str(self.tensors[name].path) and not made.come.is_set() and made.serves_this_thread():
            made.hung += 1
            made.come.wait(PATIENCE_S)
        return read(self, name, **named)

    monkeypatch.setattr(Checkpoint, "read", waiting)
    monkeypatch.setattr(slots, "READ_LIMIT_S", 0.3)
    monkeypatch.setattr(bounded_reads, "time", made)
    yield made
    made.come.set()


@pytest.fixture
def places(folder: Path) -> Iterator[AdapterPlaces]:
    spec = spec_of(locate(str(folder / "model")))
    made = AdapterPlaces(spec, LoraLimits(max_loras=3, max_rank=8, cached=1), torch.float32, CPU)
    yield made
    made.close()


@pytest.fixture
def ref(folder: Path) -> Callable[[str], AdapterRef]:
    numbers: dict[str, int] = {}
    return lambda name: AdapterRef(
        name, numbers.setdefault(name, len(numbers) + 1), str(folder / name), stamp(folder / name)
    )


def follow(places: AdapterPlaces, files: FileServer, fetches: list[AdapterFetch]) -> dict[int, AdapterArrival]:
    """Time passes only while all that are being read hang."""
    begun_before, hung_before = files.begun, files.hung
    found = {one.place: one for one in places.follow(StepPlan(step_id=0, fetches=fetches))}
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < len(fetches):
        assert time.monotonic() < deadline_s
        come = sum(one.failure is None for one in found.values())
        if files.begun - begun_before == files.hung - hung_before + come:
            files.now_s += 0.1
        found |= {one.place: one for one in places.follow(StepPlan(step_id=0))}
    return found


def test_two_hung_adapters_do_not_hold_up_a_third(places, ref, files) -> None:
    names = ["hung-1", "hung-2", "good"]
    found = follow(places, files, [AdapterFetch(place, ref(name)) for place, name in enumerate(names)])
    failures = [found[place].failure for place in range(3)]
    assert [failure and failure.code for failure in failures] == ["HF378", "HF378", None]
    assert failures[0] is not None
    assert "hung-1 could not be read within 0.3 s" in failures[0].message
    assert [held and held.name for held in places.held] == [None, None, "good"]


def test_what_comes_too_late_is_written_nowhere(places, ref, files) -> None:
    """Its place is another's by then."""
    follow(places, files, [AdapterFetch(0, ref("hung-1"))])
    assert follow(places, files, [AdapterFetch(0, ref("good"))])[0].failure is None
    good = places.places[0].clone()
    assert good.abs().sum() > 0
    files.come.set()
    deadline_s = time.monotonic() + PATIENCE_S
    while places._readers._left_behind and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert places._readers._left_behind == 0  # It has done all that it will do.
    assert torch.equal(places.places[0], good)
    assert follow(places, files, [AdapterFetch(1, ref("hung-1"))])[1].failure is None  # And it can be had now.
    assert not torch.equal(places.places[1], good)


def test_adapters_that_hang_again_and_again_do_not_gather_threads(places, ref, files, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.execution.lora.bounded_reads.MOST_LEFT_BEHIND", 2)
    before = threading.active_count()
    for _ in range(2):
        assert follow(places, files, [AdapterFetch(0, ref("hung-1"))])[0].failure.code == "HF378"
    assert threading.active_count() - before <= 2 + slots.READERS
    assert follow(places, files, [AdapterFetch(0, ref("good"))])[0].failure is None
