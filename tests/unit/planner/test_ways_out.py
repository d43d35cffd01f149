"""Ways out: in their order, true, and none that does not fit when it is planned again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import pytest
from command_parsers import plan_parser
from examples import examples
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from holdfast.cli.commands import plan
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.models import catalogue
from holdfast.planner.advice.offload import RAM_SHARE, place
from holdfast.planner.advice.remedies import BEYOND_THE_MODEL, LAST, TABLE, _is_unread, ways_out
from holdfast.planner.advice.remedy import Kind, Remedy, too_long
from holdfast.planner.advice.search import first_that_fits, that_fit
from holdfast.planner.api import question_of
from holdfast.planner.fit.placement import pinned_room
from holdfast.planner.fit.placement import place as place_layers
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import Device
from holdfast.planner.report.answer import answer
from holdfast.planner.report.text import lines
from holdfast.units import GIB, MIB

Ask = Callable[..., Question]
ORDER = (
    "utilization", "context", "sequences", "idle_gpus", "configuration", "kv_cache_dtype", "quantization", "tiers",
    "more_gpus", "bigger_gpu", "more_ram", "smaller_model", "shorter_requests", "longer_model",
)  # fmt: skip


def position(way: Remedy) -> float:
    """In the table: tiers on a disk that is not known to be there, or that nobody runs, come after more GPUs."""
    here = way.kind != "tiers" or (way.available and "nvme" not in way.settings)
    return ORDER.index(way.kind) if here else ORDER.index("more_gpus") + 0.5


def kinds(found: Plan) -> list[str]:
    return list(dict.fromkeys(way.kind for way in ways_out(found)))


def only(found: Plan, kind: str) -> list[Remedy]:
    return [way for way in ways_out(found) if way.kind == kind]


def asked(*words: str) -> Question:
    """As `holdfast plan` reads its command line."""
    return question_of(plan.read_settings(plan_parser().parse_args(words)))


def check(way: Remedy, *words: str) -> None:
    """Its flags behind the command line it is a way out of, read and planned anew."""
    again = fit(asked(*words, *shlex.split(way.flags)))
    said = (words, way.kind, way.flags)
    assert not too_long(again.question), said
    if way.tiers is None:
        assert again.fits, said
        return
    if way.available:
        placed = place_layers(again.question)
        assert placed is not None, said
        assert placed.fits, said
        assert way.fit.fits
        assert way.tiers.gpu_bytes <= way.fit.budget_bytes
        return
    assert not way.fit.fits
    rank = min(way.fit.ranks, key=lambda one: one.budget_bytes)
    assert way.tiers.gpu_bytes <= rank.budget_bytes
    assert way.flags == "", "nothing that a plan can be told makes it fit"
    assert "does not fit" in (way.note or "")
    ram_bytes = way.settings.get("ram_bytes", again.question.machine.ram_bytes)
    assert isinstance(ram_bytes, int)
    assert way.tiers.ram_bytes <= ram_bytes * RAM_SHARE + 1
    assert way.tiers.moved_bytes > 0
    assert "tiers" in kinds(again), said


@pytest.fixture(scope="module", autouse=True)
def _no_hub() -> Iterator[None]:
    """Ids of published variants are looked up in the catalogue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def test_nothing_is_offered_where_it_fits(ask: Ask) -> None:
    assert ways_out(fit(ask("llama-3.1-8b", "h100-80"))) == ()


def test_configuration_first_a_smaller_model_last(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=45000))
    ways, order = ways_out(found), kinds(found)
    assert list(ways) == sorted(ways, key=position)
    assert order[0] == "utilization"
    assert order[-1] == "smaller_model"


def test_the_context_offered_is_the_longest(ask: Ask) -> None:
    question = ask("llama-3.1-8b", "rtx4090", max_model_len=131072)
    (way,) = only(fit(question), "context")
    length = way.settings["max_model_len"]
    assert isinstance(length, int)
    assert fit(way.fit.question).fits
    longer = replace(question, settings=replace(question.settings, max_model_len=length + 16))
    assert not fit(longer).fits


def test_70b_on_24_gb_needs_more_gpus_tiers_or_two_bits(ask: Ask) -> None:
    found = fit(ask("llama-3-70b", "rtx4090", ram_bytes=64 * GIB))
    assert not found.fits
    assert kinds(found) == ["tiers", "more_gpus", "bigger_gpu", "quantization", "smaller_model"]
    tiers, eight_bits = only(found, "tiers")
    assert eight_bits.settings == {"quantization": "fp8"}, "more bits, and slower"
    assert tiers.tiers is not None
    assert tiers.tiers.one is not None
    assert "by itself" in (tiers.note or "")
    assert 20 <= tiers.tiers.resident_layers <= 45
    assert 0.5 < tiers.tiers.one.tokens_per_s < 3


def test_what_runs_on_the_card_there_is_comes_before_more_cards() -> None:
    first = answer(asked("qwen3-30b-a3b", "--gpu", "rtx4060", "--ram", "64GiB")).ways_out[0]
    assert (first.kind, first.available) == ("tiers", True)
    assert first.settings == {"model": "Qwen/Qwen3-30B-A3B-GPTQ-Int4"}


@pytest.mark.parametrize(
    ("words", "undone"),
    [
        (("llama-3.1-70b-awq", "--gpu", "rtx4090", "--ram", "64GiB", "-ngl", "99"), "--gpu-layers auto"),
        (("llama-3.1-70b-awq", "--gpu", "rtx4090", "--ram", "64GiB", "-ngl", "60"), "--gpu-layers auto"),
        (("qwen3-30b-a3b", "-q", "Q4_K_M", "--gpu", "rtx3060", "--ram", "32GiB", "-ngl", "99"), "--gpu-layers auto"),
        (("qwen3-30b-a3b", "-q", "Q4_K_M", "--gpu", "rtx3060", "--ram", "32GiB", "-ncmoe", "9"), "--n-cpu-moe 0"),
    ],
)
def test_a_number_of_layers_that_does_not_fit_is_to_be_left_out_first(words: tuple[str, ...], undone: str) -> None:
    """Every remedy planned again is what it says: no other model or GPU inherits the number."""
    found = answer(asked(*words))
    assert not found.runs
    assert found.ways_out[0].flags == undone
    for way in found.ways_out:
        again = answer(asked(*words, *shlex.split(way.flags)))
        assert again.runs, way.flags
        plan = again.fit if again.fits else again.offload and again.offload.placement.plan
        assert plan
        assert plan.limits.max_model_len == way.fit.limits.max_model_len, way.flags


def test_a_context_that_nobody_set_is_shortened_for_layers_by_hand() -> None:
    words = ("llama-3.1-70b-awq", "--gpu", "rtx4090", "--ram", "64GiB", "-ngl", "40")
    found = answer(asked(*words))
    assert found.fits
    assert 512 <= found.max_model_len < 4096
    assert f"--max-model-len {found.max_model_len} " in found.commands["holdfast"].text
    assert answer(asked(*words, "--max-model-len", str(found.max_model_len))).fits
    assert not answer(asked(*words, "--max-model-len", "4096")).fits
    said = [one for one in found.decisions if one.field == "max_model_len"]
    assert [one.reason.partition("the longest that ")[2] for one in said] == ["--gpu-layers 40 leaves room for"]


def test_tiers_need_the_ram(ask: Ask) -> None:
    """Or a disk for what RAM does not hold."""
    (way,) = only(fit(ask("llama-3-70b", "rtx4090", ram_bytes=8 * GIB)), "tiers")
    assert way.flags.startswith("--nvme ")
    assert "--nvme-path DIR" in (way.note or "")


def test_a_disk_is_a_remedy_for_ram_that_is_too_small_and_serve_is_told_of_it() -> None:
    words = ("llama-3.1-70b-awq", "--gpu", "rtx3060", "--ram", "32GiB")
    found = answer(asked(*words))
    assert not found.runs
    assert "holdfast serve" not in str(found).partition("Decisions")[0]
    (way,) = (way for way in found.ways_out if way.kind == "tiers")
    again = answer(asked(*words, *shlex.split(way.flags)))
    assert again.runs
    assert again.offload is not None
    tiers = pinned_room(again.offload.placement.plan.question)
    assert tiers is not None
    assert 27 * GIB < tiers < 30 * GIB, "without the server's own processes, which serve adds"
    assert f"--ram {tiers // MIB}MiB --nvme-path DIR" in again.offload.command.text


def test_brief_has_the_rates_of_what_runs() -> None:
    brief = lines(answer(asked("llama-3.1-70b-awq", "--gpu", "rtx4090", "--ram", "64GiB")), brief=True, width=300)
    assert "With layers in RAM:" in brief
    assert not [line for line in brief if "no throughput estimate" in line or "2 x" in line]
    assert [line for line in brief if line.startswith("1 at once, ")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-70b-awq", "--gpu", "rtx4090", "-ngl", "20"), "fits; runs with 60 of 80 layers streamed from RAM"),
        (("qwen3-30b-a3b-gptq-int4", "--gpu", "rtx4090", "--cpu-moe"), "fits; runs with 6,144 of 6,144 experts in RAM"),
    ],
)
def test_what_was_placed_by_hand_is_in_the_first_line(words: tuple[str, ...], said: str) -> None:
    assert said in lines(answer(asked(*words, "--ram", "64GiB")), brief=True, width=300)[0]


@pytest.mark.parametrize(("card", "share"), [("rtx4090", 0.85), ("rtx3060", 0.83)])
def test_the_share_beside_a_desktop_is_no_more_than_what_it_leaves(card: str, share: float) -> None:
    found = answer(asked("llama-3.1-8b", "-q", "awq", "--gpu", card))
    (warning,) = (one for one in found.warnings if one.code == "HFW23")
    assert warning.fix == f"--gpu-memory-utilization {share}"
    assert f"--gpu-memory-utilization {share} " in str(found).partition("  safe ")[2].partition("  max ")[0]


def test_engines_without_a_command_are_named() -> None:
    words = ("qwen3-30b-a3b", "-q", "Q4_K_M", "--gpu", "rtx3060", "--ram", "32GiB", "--n-cpu-moe", "30")
    said = lines(answer(asked(*words)))
    assert [line.strip() for line in said if line.endswith("no command:")] == [
        f"{name}, no command:" for name in ("vLLM", "SGLang", "llama.cpp")
    ]
    with pytest.raises(ConfigurationError, match="not for llama") as caught:
        answer(asked(*words), engine="llama.cpp")
    assert caught.value.code == "HF136"


def test_what_ram_must_hold_is_within_the_budget_that_was_set() -> None:
    found = answer(asked("qwen3-30b-a3b", "-q", "awq", "--gpu", "rtx4060", "--ram", "32GiB")).offload
    assert found is not None
    assert found.runs
    assert found.placement.free_ram_bytes <= 32 * GIB
    tiers = pinned_room(found.placement.plan.question)
    assert tiers is not None
    assert f"--ram {tiers // MIB}MiB" in found.command.text


@pytest.mark.parametrize(
    ("words", "names_the_gpu"),
    [((), True), (("--vram", "20GiB"), False), (("-ngl", "20"), False), (("--max-model-len", "4096"), True)],
)
def test_the_command_with_ram_is_of_the_gpu(words: tuple[str, ...], names_the_gpu: bool) -> None:
    """A budget of RAM alone would choose the CPU (select_device.py)."""
    found = answer(asked("llama-3.1-70b-awq", "--gpu", "rtx4090", "--ram", "64GiB", *words))
    assert " --ram " in found.commands["holdfast"].text
    assert ("--device cuda" in found.commands["holdfast"].text) == names_the_gpu


def test_tiers_move_what_the_physics_say(ask: Ask, gpu: Callable[..., Device]) -> None:
    """Int4 70B in 22.93 GiB over PCIe 5: about half of 80 layers stay, and 32 sequences share every byte moved."""
    budget = int(22.93 * GIB)
    device = gpu("h100-80", budget_bytes=budget)
    question = ask("llama-3-70b-awq", device=device, traffic=(32, 128, 128), max_num_batched_tokens=512)
    found = place(fit(question))
    assert found is not None
    assert found.one is not None
    assert found.at_batch is not None
    assert 35 <= found.resident_layers <= 45
    assert found.moved_bytes / 1e9 == pytest.approx(17.8, rel=0.15)
    assert found.one.high == pytest.approx(3.08, rel=0.03), "54.9 GB/s, and the link never idles"
    assert found.at_batch.high == pytest.approx(99, rel=0.03)


def test_awq_70b_on_40_gb_does_not_fit_and_two_hold_it(ask: Ask) -> None:
    found = fit(ask("llama-3-70b-awq", "a100-40", utilization=0.88, max_model_len=8192, max_num_seqs=16))
    assert not found.fits
    assert found.weights_bytes / GIB == pytest.approx(37.3, abs=0.1), "with a byte for each zero point"
    first = only(found, "more_gpus")[0]
    assert first.settings["gpus"] == 2
    assert first.settings["tensor_parallel_size"] == 2


def test_published_variants_come_before_what_has_to_be_made(ask: Ask) -> None:
    ways = only(fit(ask("llama-3.1-8b", "rtx3060")), "quantization")
    assert ways
    assert all(catalogue.find(str(way.settings["model"])).quantized for way in ways)
    question = ask("llama-3-8b", "rtx3060")
    for engine, methods in ((None, ["fp8", "int4"]), ("holdfast", ["fp8", "int4"]), ("vllm", ["fp8", "nf4"])):
        made = only(fit(replace(question, engine=engine)), "quantization")
        assert [way.settings["quantization"] for way in made] == methods
        assert all(way.available for way in made), "no file is needed"


def test_fp8_kv_only_where_an_engine_reads_it(ask: Ask) -> None:
    """A 4090 has FP8 units; on a 3090 of the same size engines decode it, and on Turing nobody does but Holdfast."""
    settings = {"max_model_len": 60000}
    assert only(fit(ask("llama-3.1-8b", "rtx4090", **settings)), "kv_cache_dtype")
    question = ask("llama-3.1-8b", "rtx3090", **settings)
    assert only(fit(replace(question, engine="vllm")), "kv_cache_dtype")
    (way,) = only(fit(replace(question, engine="holdfast")), "kv_cache_dtype")
    assert way.commands()["holdfast"].available
    assert not only(fit(replace(ask("llama-3.1-8b", "titan-rtx", **settings), engine="vllm")), "kv_cache_dtype")


def test_traffic_that_is_too_much_may_wait(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", traffic=(64, 2000, 500)))
    (way,) = only(found, "sequences")
    count = way.settings["max_num_seqs"]
    assert isinstance(count, int)
    assert 8 <= count < 64
    assert not only(found, "context"), "traffic cannot be shortened"


def test_gpus_that_stand_idle_are_used_first(ask: Ask) -> None:
    found = fit(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=1))
    way = ways_out(found)[0]
    assert way.kind == "idle_gpus"
    assert way.settings == {"tensor_parallel_size": 4}


def test_a_low_utilization_is_raised_with_a_variant(ask: Ask) -> None:
    ways = only(fit(ask("llama-3.1-8b", "rtx3060", utilization=0.5)), "quantization")
    assert any(way.settings.get("gpu_memory_utilization") == 0.9 for way in ways)


def test_on_a_cpu_ggufs_more_ram_and_no_gpus(ask: Ask, cpu: Callable[..., Device]) -> None:
    found = fit(ask("llama-3.1-8b", device=cpu(12, 16)))
    assert kinds(found) == ["quantization", "more_ram", "smaller_model"]
    first = only(found, "quantization")[0]
    assert first.settings["model"] == "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"
    assert first.available
    assert "a GGUF of as many bits is faster" in (first.note or "")
    made = [way for way in only(found, "quantization") if way.fit.question.model.format == "gguf"]
    assert [way.settings["quantization"] for way in made] == ["Q8_0", "Q4_1", "Q4_0"]
    assert not any(way.available for way in made)
    assert "converted" in (made[0].note or "")


def test_a_model_unknown_to_the_catalogue_has_ways_out_too(ask: Ask) -> None:
    known = ask("llama-3-70b", "rtx4090")
    question = replace(known, model=replace(known.model, name="./some/folder", origin="folder"))
    assert {"more_gpus", "tiers", "smaller_model"} <= set(kinds(fit(question)))


MODELS = (
    "llama-3-8b",
    "llama-3.1-70b",
    "qwen2.5-7b",
    "gemma-3-12b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
)
MACHINES = (
    ("--gpu", "rtx3060"), ("--gpu", "rtx4090"), ("--gpu", "t4x2"), ("--gpu", "h100-80x2"), ("--gpu", "rtx4090,rtx3090"),
    ("--gpu", "rtx4090", "--vram", "10GiB"), ("--gpu", "l4x2", "--vram", "9GiBx2"), ("--vram", "12GiB"),
    ("--vram", "12GiBx2"), ("--device", "cpu", "--ram", "5GiB"), ("--gpu", "rtx4090", "--ram", "256GiB"),
    ("--gpu", "rtx4090", "--ram", "8GiB", "--nvme", "1TB"),
)  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, ...]:
    def one_of(*choices: tuple[str, ...]) -> tuple[str, ...]:
        return draw(st.sampled_from(((), *choices)))

    length = draw(st.integers(1, 5000))
    return (
        draw(st.sampled_from(MODELS)),
        *draw(st.sampled_from(MACHINES)),
        *one_of(("-tp", "1"), ("-tp", "2")),
        *one_of(("-pp", "2")),
        *one_of(("-q", "awq"), ("-q", "Q8_0")),
        *one_of(("--max-num-seqs", "8"), ("--max-num-seqs", "256")),
        *one_of(("--gpu-memory-utilization", "0.3"), ("--gpu-memory-utilization", "0.95")),
        *one_of(
            ("--max-model-len", "8192"),
            ("--max-model-len", "2048", "--concurrency", "100"),
            ("--concurrency", str(draw(st.integers(1, 300))), "--prompt", str(length), "--output", "500"),
            ("--concurrency", "2", "--prompt", "9000", "--output", "500"),
        ),
    )


@given(command_lines())
@settings(max_examples=examples(30), deadline=None)
def test_every_way_out_fits_when_its_flags_are_planned(words: tuple[str, ...]) -> None:
    try:
        found = fit(asked(*words))
    except ConfigurationError:
        reject()
    ways = ways_out(found)
    assert not (found.fits and ways) or too_long(found.question)
    for way in ways:
        check(way, *words)
    waits = found.question.traffic is not None and not too_long(found.question)

    def place(way: Remedy) -> tuple[bool, bool, bool, float]:
        """What serves part of the traffic comes after what serves all of it, and what nobody has yet and this engine
        could not read after what can be had; a smaller model last."""
        unread = found.question.engine is None and _is_unread(way)
        return way.kind == "smaller_model", waits and not way.meets_request, unread, position(way)

    places = [place(way) for way in ways]
    assert places == sorted(places)


def ways_of(*words: str) -> dict[str, list[Remedy]]:
    found: dict[str, list[Remedy]] = {}
    for way in ways_out(fit(asked(*words))):
        check(way, *words)
        found.setdefault(way.kind, []).append(way)
    return found


def test_more_gpus_are_named_with_their_number() -> None:
    first = ways_of("--model", "llama-3-70b", "--gpu", "rtx4090")["more_gpus"][0]
    assert first.settings["gpu"] == f"rtx4090x{first.settings['gpus']}"
    bare = ways_of("--model", "llama-3-70b", "--vram", "22GiB")["more_gpus"][0]
    assert bare.settings["vram"] == f"22528MiBx{bare.settings['gpus']}"


def test_stages_that_are_given_up_are_said() -> None:
    ways = ways_of("--model", "llama-3.1-70b", "--gpu", "rtx4090x2", "-pp", "2")["more_gpus"]
    assert any(way.settings.get("pipeline_parallel_size") == 1 for way in ways)


def test_fewer_at_once_outrank_the_traffic() -> None:
    words = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "rtx4090",
        "--concurrency",
        "64",
        "--prompt",
        "2000",
        "--output",
        "500",
    )
    (way,) = ways_of(*words)["sequences"]
    assert way.settings["concurrency"] == way.settings["max_num_seqs"]


def test_a_budget_meant_for_a_smaller_gpu_grows_with_it() -> None:
    (way, *_) = ways_of("--model", "llama-3.1-8b", "--gpu", "rtx4090", "--vram", "10GiB")["bigger_gpu"]
    assert "--vram" in way.flags
    device = way.fit.ranks[0].device
    assert device.budget_bytes == pytest.approx(0.9 * device.total_bytes, rel=0.001)


def test_a_model_planned_as_quantized_becomes_a_smaller_one_planned_so() -> None:
    (way,) = ways_of("--model", "llama-3.1-70b", "-q", "awq", "--gpu", "rtx3060")["smaller_model"]
    assert way.fit.question.model.made_as == "awq"


@pytest.mark.parametrize(
    ("model", "gpu", "smaller"),
    [
        ("llama-3.1-70b", "rtx4090", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen2.5-72b", "rtx4090", "Qwen/Qwen2.5-7B-Instruct"),
        ("gemma-3-27b", "rtx4090", "google/gemma-3-4b-it"),
        ("llama-3.3-70b", "rtx4090", "meta-llama/Llama-3.2-3B-Instruct"),
    ],
)
def test_the_next_smaller_of_the_same_series_then_the_newest(ask: Ask, model: str, gpu: str, smaller: str) -> None:
    (way,) = only(fit(ask(model, gpu)), "smaller_model")
    assert way.settings["model"] == smaller


# Requests longer than the model reads


def test_requests_that_the_model_cannot_read_have_other_ways_out() -> None:
    words = ("--model", "llama-3-8b", "--gpu", "h100-80", "--concurrency", "2", "--prompt", "9505", "--output", "500")
    ways = ways_of(*words)
    assert list(ways) == ["shorter_requests", "longer_model"]
    assert ways["shorter_requests"][0].settings == {"prompt": 8192 - 500, "output": 500}
    assert ways["longer_model"][0].settings == {"model": "meta-llama/Llama-3.1-8B-Instruct"}


def test_shorter_requests_may_also_have_to_wait() -> None:
    words = ("--model", "llama-3-8b", "--gpu", "rtx4090", "--concurrency", "64", "--prompt", "9505", "--output", "500")
    (way,) = ways_of(*words)["shorter_requests"]
    assert 1 <= int(str(way.settings["concurrency"])) < 64


# Disk


def test_what_ram_does_not_hold_may_lie_on_disk(ask: Ask) -> None:
    question = ask("llama-3-70b", "rtx4090", ram_bytes=16 * GIB)
    assert "nvme" in only(fit(question), "tiers")[0].settings
    (way,) = only(fit(replace(question, machine=replace(question.machine, nvme_bytes=1000 * GIB))), "tiers")
    assert way.tiers is not None
    assert way.tiers.one is not None
    assert way.available
    assert 16 * GIB * RAM_SHARE > way.tiers.ram_bytes > 8 * GIB
    assert way.tiers.nvme_bytes > 0
    assert "on NVMe at 3 GB/s (assumed)" in way.change
    embedding = 128256 * 8192 * 2  # It lies there too, and rows of it are read.
    assert way.tiers.one.high < 1.001 * 3e9 / (way.tiers.nvme_bytes - embedding)
    small = replace(question, machine=replace(question.machine, nvme_bytes=GIB))
    assert only(fit(small), "tiers") == []


# Several changes at once


def test_several_changes_together_are_offered_where_they_give_much_more_context() -> None:
    less = ("--gpu-memory-utilization", "0.83")
    ways = ways_of("--model", "qwen3-32b-awq", "--gpu", "rtx4090", *less)
    alone = max(ways[kind][0].fit.limits.max_model_len for kind in ("utilization", "context", "kv_cache_dtype"))
    plain, small = ways["configuration"]
    assert plain.settings["gpu_memory_utilization"] == small.settings["gpu_memory_utilization"] == 0.95
    assert "kv_cache_dtype" not in plain.settings
    assert small.settings["kv_cache_dtype"] == "fp8"
    assert plain.fit.limits.max_model_len > 1.25 * alone
    assert small.fit.limits.max_model_len > 1.9 * plain.fit.limits.max_model_len
    stated = ways_of("--model", "qwen3-32b-awq", "--gpu", "rtx4090", *less, "--max-model-len", "4500")
    assert "configuration" not in stated


@pytest.mark.parametrize(("words", "kind", "parallel"), [
    (("qwen2.5-14b", "--gpu", "t4x3", "-pp", "1"), "idle_gpus", (1, 3)),
    (("llama-3.1-70b", "--gpu", "rtx4090x2", "-tp", "1"), "quantization", (2, 1)),
    (("llama-3.1-8b", "--gpu", "rtx4060x4", "-tp", "1"), "idle_gpus", (4, 1)),
    (("qwen2.5-32b", "--gpu", "rtx3090x3", "-tp", "1", "--max-model-len", "8192"), "quantization", None),
])  # fmt: skip
def test_gpus_that_are_there_come_before_more_of_them(
    words: tuple[str, ...], kind: str, parallel: tuple[int, int] | None
) -> None:
    """Layers in stages where heads do not split, and fewer bits over GPUs that stood idle."""
    found = fit(asked(*words))
    assert not found.fits
    ways = ways_out(found)
    way = next(way for way in ways if way.kind == kind)
    check(way, *words)
    assert len(way.fit.question.machine.devices) == len(found.question.machine.devices)
    if parallel is not None:
        assert (way.fit.tensor_parallel, way.fit.pipeline_parallel) == parallel
    bought = [index for index, other in enumerate(ways) if other.kind == "more_gpus"]
    assert all(ways.index(way) < index for index in bought)


def test_one_gpu_is_not_split() -> None:
    assert not [way for way in ways_out(fit(asked("llama-3.1-70b", "--gpu", "rtx4090"))) if way.kind == "idle_gpus"]


def test_more_sequences_than_the_traffic_has_are_not_needed() -> None:
    words = (
        "llama-3.1-8b", "--gpu", "rtx4090", "--max-num-seqs", "100000", "--concurrency", "2", "--prompt", "100",
        "--output", "500",
    )  # fmt: skip
    found = fit(asked(*words))
    assert not found.fits
    way = ways_out(found)[0]
    assert (way.kind, way.settings) == ("sequences", {"max_num_seqs": 2})
    check(way, *words)


def test_what_cannot_hold_the_weights_is_not_planned(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that took longest of the whole catalogue: it was planned 186 times."""
    planned: list[Question] = []

    def counting(question: Question) -> Plan:
        planned.append(question)
        return fit(question)

    for module in ("remedy", "remedies", "hardware_remedies"):
        monkeypatch.setattr(f"holdfast.planner.advice.{module}.fit", counting)
    assert ways_out(fit(ask("glm-5", "rtx4090", count=8)))
    assert len(planned) < 40


def test_the_search_plans_no_more_than_is_taken_and_keeps_what_fits_in_order() -> None:
    tried: list[int] = []

    def plan(size: int) -> str | None:
        tried.append(size)
        if size == 2:
            raise DoesNotFitError("too large")
        return None if size == 1 else f"plan {size}"

    found = that_fit(range(1, 9), plan)
    assert next(found) == (3, "plan 3")
    assert tried == [1, 2, 3]
    assert first_that_fits([1, 2], plan) is None
    assert [size for size, _ in that_fit([4, 1, 3], plan)] == [4, 3]


def test_every_kind_of_remedy_has_a_row() -> None:
    rows = [row.kind for row in (*TABLE, *LAST, *BEYOND_THE_MODEL)]
    assert tuple(dict.fromkeys(rows)) == ORDER
    assert set(rows) == set(get_args(Kind))
