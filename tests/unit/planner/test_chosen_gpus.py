"""A plan that takes some GPUs of several: its commands show the engines those, in their order, and no others."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.hardware import gpus
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner.compat.vllm_release import parse_vllm
from holdfast.planner.engines.command import shown_gpus
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.machine import Asked, machine_of, measured_device
from holdfast.planner.inputs.question import Device, Machine
from holdfast.planner.report.answer import answer
from holdfast.units import GIB

Ask = Callable[..., Question]
BY_BUS = "CUDA_DEVICE_ORDER=PCI_BUS_ID"


def on(question: Question, *devices: Device) -> Question:
    return replace(question, machine=Machine(devices=devices))


def named(question: Question, text: str) -> Question:
    return replace(question, machine=machine_of(Asked(gpu=text)).machine)


def measured(index: int, physical: int, name: str = "h100-80", uuid: str = "GPU-1", mig: bool = False) -> Device:
    known = gpus.find(name)
    size = known.usable_bytes
    return measured_device(
        index,
        NvidiaGpu(index=physical, uuid=uuid, name=known.name, total_bytes=size, free_bytes=size, known=known, mig=mig),
    )


@pytest.mark.parametrize(("written", "shown"), [
    ("t4,h100-80", f"CUDA_VISIBLE_DEVICES=1 {BY_BUS} "), ("h100-80,t4", f"CUDA_VISIBLE_DEVICES=0 {BY_BUS} "),
    ("h100-80x4", "CUDA_VISIBLE_DEVICES=0 "), ("mi300xx2", "HIP_VISIBLE_DEVICES=0 "), ("h100-80", ""),
    ("mi300x,t4,h100-80", ""), ("m3-max-36,t4,h100-80", f"CUDA_VISIBLE_DEVICES=1 {BY_BUS} "),
    ("m3-max-36,h100-80", ""),
])  # fmt: skip
def test_an_index_is_of_the_order_in_which_they_were_named(ask: Ask, written: str, shown: str) -> None:
    found = fit(named(ask("llama-3.1-8b", "h100-80", max_model_len=8192), written))
    assert len(found.ranks) == 1
    assert shown_gpus(found) == shown


def test_every_engine_is_shown_them(ask: Ask) -> None:
    question = named(ask("llama-3.1-8b", "h100-80", max_model_len=8192), "t4,h100-80")
    for command in commands(fit(question), sequences=4).values():
        assert shlex.split(command.text)[:2] == ["CUDA_VISIBLE_DEVICES=1", BY_BUS]
    document = answer(question).to_json()
    assert all(text.startswith("CUDA_VISIBLE_DEVICES=1 ") for text in document["commands"].values())


def test_all_of_them_need_no_telling(ask: Ask) -> None:
    question = ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=4, max_model_len=8192)
    assert shown_gpus(fit(question)) == ""
    part = fit(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=2, max_model_len=8192))
    assert shown_gpus(part) == "CUDA_VISIBLE_DEVICES=0,1 "


def test_what_the_environment_shows_already_is_counted_as_the_machine_counts(ask: Ask) -> None:
    """With CUDA_VISIBLE_DEVICES=2,3 the first that is seen is the machine's third: a new value replaces the old."""
    question = on(ask("llama-3.1-8b", "h100-80", max_model_len=8192), measured(0, 2), measured(1, 3))
    assert shown_gpus(fit(question)) == "CUDA_VISIBLE_DEVICES=2 "
    crowded = replace(measured(0, 2), free_bytes=8 * GIB)
    assert shown_gpus(fit(on(question, crowded, measured(1, 3)))) == "CUDA_VISIBLE_DEVICES=3 "


def test_a_slice_has_a_name_and_no_number(ask: Ask) -> None:
    question = ask("llama-3.1-8b", "h100-80", max_model_len=8192)
    part = measured(1, 0, uuid="MIG-0a1b", mig=True)
    found = fit(on(question, replace(measured(0, 0), free_bytes=8 * GIB), part))
    assert shown_gpus(found) == "CUDA_VISIBLE_DEVICES=MIG-0a1b "


def test_beside_the_variables_of_an_engine(ask: Ask) -> None:
    found = fit(ask("llama-3-8b", "h100-80", count=2, max_model_len=4096))
    text = commands(found, sequences=4, vllm=parse_vllm("==0.8:v0"))["vllm"].text
    assert text.startswith("CUDA_VISIBLE_DEVICES=0 VLLM_USE_V1=0 vllm serve ")


def test_no_gpus_are_shown_on_a_cpu(ask: Ask, cpu: Callable[..., Device]) -> None:
    assert shown_gpus(fit(ask("smollm2-135m", device=cpu(8)))) == ""
