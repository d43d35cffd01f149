"""The report: what a person must find in it, within its width, with and without colour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.hardware import Processor
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.planner.fit.search import Question
from holdfast.planner.inputs.question import Device
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.report.compare import compare_lines
from holdfast.planner.report.text import lines, sizes
from holdfast.planner.report.wrapping import LEAST_WIDTH, wrapped
from holdfast.units import GIB, counted

Ask = Callable[..., Question]
ESCAPES = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def answers(ask: Ask) -> list[PlanAnswer]:
    return [
        answer(ask("llama-3-8b", "rtx4090")),
        answer(ask("llama-3-70b", "rtx4090", ram_bytes=64 * GIB)),
        answer(ask("llama-3.1-70b", "h100-80", count=4, traffic=(32, 2000, 500)), engine="vllm==0.11"),
        answer(ask("llama-3.1-405b", "h100-80", count=32, tensor_parallel=8, pipeline_parallel=4)),
    ]


@pytest.mark.parametrize("width", [20, 60, 80, 132])
def test_no_line_is_wider_than_asked(answers: list[PlanAnswer], width: int) -> None:
    for found in answers:
        for line in lines(found, width=width):
            # A single long word, such as an address, cannot be broken within a command.
            assert len(line) <= max(width, LEAST_WIDTH) or "://" in line, line


def test_colour_changes_nothing_but_colour(answers: list[PlanAnswer]) -> None:
    for found in answers:
        plain, coloured = lines(found, width=100), lines(found, width=100, colour=True)
        assert [ESCAPES.sub("", line) for line in coloured] == plain
        assert not any("\x1b" in line for line in plain)
        assert any("\x1b" in line for line in coloured)


def test_the_first_line_is_the_answer(answers: list[PlanAnswer]) -> None:
    assert lines(answers[0])[0].endswith(": fits")
    assert re.search(r"does not fit: 11\d\.\d\d GiB short", " ".join(lines(answers[1])[:2]))


def test_bars_show_what_lies_where(answers: list[PlanAnswer]) -> None:
    text = lines(answers[0], width=80)
    rows = {line.split()[0]: line for line in text if re.match(r"  (weights|overhead|KV|free|reserve) ", line)}
    assert set(rows) == {"weights", "overhead", "KV", "free", "reserve"}
    assert "14.96 GiB" in rows["weights"]
    assert rows["weights"].count("█") > rows["reserve"].count("·") > 0
    found = answers[0]
    rank = found.fit.ranks[0]
    parts = sizes(found, rank)
    whole = sum(parts[name] for name in ("weights", "overhead", "KV", "free", "reserve"))
    assert whole == rank.device.total_bytes


def test_what_is_short_is_drawn(answers: list[PlanAnswer]) -> None:
    text = lines(answers[1], width=80)
    assert any(line.startswith("  short") and "!" in line for line in text)
    bar = next(line for line in text if line.startswith("  ["))
    # 115.7 of 137.3 GiB are too much.
    assert bar.count("!") / (len(bar) - 4) == pytest.approx(0.84, abs=0.02)


def test_alike_gpus_are_drawn_once(answers: list[PlanAnswer]) -> None:
    text = "\n".join(lines(answers[2], width=100))
    assert "GPU 0-3" in text
    assert text.count("  weights ") == 1
    stages = "\n".join(lines(answers[3], width=100))
    assert "GPU 0-7" in stages
    assert "GPU 24-31" in stages


def test_the_sections_are_there(answers: list[PlanAnswer]) -> None:
    fits, short = ("\n".join(lines(found, width=100, verbose=True)) for found in answers[:2])
    for title in ("Decisions", "Warnings", "Configurations", "Commands", "Rules of thumb"):
        assert title in fits
    assert "Remedies" not in fits
    assert "Remedies" in short
    assert "HFW28" in short
    assert "With layers in RAM" in short
    assert "holdfast serve does this by itself" in short.replace("\n      ", " ")


def test_what_the_hosts_cores_gain_is_said_where_it_is_counted(ask: Ask) -> None:
    asked = ask("llama-3.1-70b-awq", "rtx4090", ram_bytes=64 * GIB)
    host = Processor(model="", cores=16, features=KERNEL_VARIANTS["amx"])
    named = answer(asked)
    here = answer(replace(asked, machine=replace(asked.machine, host=host)))
    faster, without = (found.to_json()["offload"] for found in (here, named))
    assert without["host_gain"] is None
    assert "on the host's cores" not in "\n".join(lines(named))
    of_one = [found["throughput"]["batches"][0]["tokens_per_s"] for found in (faster, without)]
    assert faster["host_gain"] == pytest.approx(of_one[0] / of_one[1], rel=0.05)
    said = " ".join(" ".join(lines(here)).split())
    assert f"{faster['host_gain']:.1f} times as fast as without; counted above" in said


def test_only_the_engine_that_was_asked_for(answers: list[PlanAnswer]) -> None:
    text = "\n".join(lines(answers[2], width=120))
    assert "vllm serve" in text
    assert "sglang" not in text
    assert "llama-server" not in text


def test_a_cpu_is_drawn_too(ask: Ask, cpu: Callable[..., Device]) -> None:
    text = "\n".join(lines(answer(ask("smollm2-135m", device=cpu(8)))))
    assert "CPU 0" in text
    assert "no throughput estimate" in text


def test_side_by_side(ask: Ask) -> None:
    machines = [answer(ask("llama-3.1-8b", gpu)) for gpu in ("rtx3060", "rtx4090", "h100-80")]
    text = compare_lines(machines, width=100)
    assert text[1].startswith("NVIDIA GeForce RTX 3060")
    assert [("yes" in line) for line in text[1:4]] == [False, True, True]
    assert text[4].startswith("NVIDIA GeForce RTX 3060: ")
    models = [answer(ask(model, "rtx4090")) for model in ("llama-3.1-8b", "qwen3-8b")]
    assert compare_lines(models, width=100)[-1] == "at once: sequences of 4,096 tokens that fit in the KV cache"
    assert compare_lines(models, width=100)[1].startswith("meta-llama/Llama-3.1-8B-Instruct")
    short = [models[0], answer(ask("gpt2", "rtx4090"))]
    assert "sequences of 1,024 to 4,096 tokens, each plan's own," in compare_lines(short, width=100)[-1]
    assert all(len(line) <= 80 for line in compare_lines([*machines, *models], width=80))


def test_side_by_side_the_machine_is_named_and_so_are_number_types_that_differ(
    ask: Ask, cpu: Callable[..., Device]
) -> None:
    asked = [ask(name, device=cpu(64), runs_here=name != "qwen3-8b") for name in ("qwen3-8b", "llama-3.1-8b")]
    text = "\n".join(compare_lines([answer(question) for question in asked], 300))
    assert "all on CPU: 57.60 GiB usable" in text
    assert "Qwen/Qwen3-8B: dtype bfloat16: Holdfast does not run this model" in text
    assert "meta-llama/Llama-3.1-8B-Instruct: dtype float32: this CPU" in text
    alike = "\n".join(compare_lines([answer(ask(name, "l4", count=2)) for name in ("qwen3-8b", "llama-3.1-8b")], 300))
    assert "all on 2 x NVIDIA L4: 19.94 GiB usable of each" in alike
    assert "dtype" not in alike


def test_gpus_of_two_kinds_are_both_named(ask: Ask, gpu: Callable[..., Device]) -> None:
    question = ask("llama-3.1-8b", "rtx4090", count=2, tensor_parallel=2)
    mixed = replace(question.machine, devices=(gpu("rtx4090"), gpu("rtx3090", 1)))
    found = answer(replace(question, machine=mixed))
    assert "on NVIDIA GeForce RTX 4090 and NVIDIA GeForce RTX 3090: " in lines(found, width=200)[0]
    budgets = [decision for decision in found.decisions if decision.field == "budget"]
    assert [one.reason for one in budgets] == [
        "usable memory of NVIDIA GeForce RTX 4090",
        "usable memory of NVIDIA GeForce RTX 3090",
    ]
    assert (
        "on 2 x NVIDIA GeForce RTX 4090: "
        in lines(answer(ask("llama-3.1-8b", "rtx4090", count=2, tensor_parallel=2)), width=200)[0]
    )


def test_what_the_pool_does_not_take_is_not_said_to_be_for_kv(ask: Ask, cpu: Callable[..., Device]) -> None:
    """A pool on a CPU has a usual size; the rest of the budget is for nobody. With it terms are the budget."""
    found = answer(ask("smollm2-135m", device=cpu(21)))
    (device,) = found.to_json()["devices"]
    assert device["unused_bytes"] > 10 * GIB
    assert sum(device["terms"].values()) + device["unused_bytes"] == device["budget_bytes"]
    (free,) = [line for line in lines(found, width=200) if line.startswith("  free ")]
    assert free.endswith("GiB of it for KV")
    whole = lines(answer(ask("smollm2-135m", "rtx4090")), width=200)
    assert next(line for line in whole if line.startswith("  free ")).endswith("also for KV")


def test_shares_add_up_also_where_it_is_short(answers: list[PlanAnswer]) -> None:
    for found in answers[:2]:
        rows = [line for line in lines(found, width=100) if re.match(r"  (weights|overhead|KV|free|reserve) ", line)]
        shares = [float(share) for row in rows for share in re.findall(r"([\d.]+)%", row)]
        assert sum(shares) == pytest.approx(100, abs=0.3)
    assert any("percentages are of" in line for line in lines(answers[1]))


def test_figures_of_several_gpus_are_said_to_be_of_one(answers: list[PlanAnswer]) -> None:
    assert any("each: the figures below are for one" in line for line in lines(answers[2], width=120))
    assert not any("figures below" in line for line in lines(answers[0], width=120))


def test_rates_say_at_which_length(answers: list[PlanAnswer]) -> None:
    rate = answers[2].throughput
    assert rate is not None
    text = "\n".join(lines(answers[2], width=200))
    assert f"32 at once, {rate.context_tokens:,} tokens in each: about" in text
    assert "prompts of 2,000: about" in text


@pytest.mark.parametrize(
    ("number", "said"),
    [(1, "1 sequence"), (1.04, "1 sequence"), (2.5, "2.5 sequences"), (0.0, "0 sequences"), (1234, "1,234 sequences")],
)
def test_one_is_not_many(number: float, said: str) -> None:
    assert counted(number, "sequence") == said


def test_brief_is_the_answer_and_the_best_way_out(answers: list[PlanAnswer]) -> None:
    short, asked = lines(answers[1], brief=True), "\n".join(lines(answers[2], brief=True, width=120))
    assert len(short) < 16 < 30 < len(lines(answers[1]))
    assert not any("█" in line for line in short), "bars are for the whole answer"
    assert "does not fit" in " ".join(short[:2])
    (number,) = (line[:6] for line in short if re.match(r"   \d\. ", line))
    assert int(number.strip(" .")) == (answers[1].best or 0) + 1
    assert "Decisions" not in short
    assert not any("vllm serve" in line for line in short)
    assert "vllm serve" in asked, "the command of the engine that was asked for"


def test_rules_of_thumb_are_for_those_who_ask(answers: list[PlanAnswer]) -> None:
    assert not any("Rules of thumb" in line for line in lines(answers[0]))
    assert any("Rules of thumb" in line for line in lines(answers[0], verbose=True))
    assert answers[0].to_json()["rules_of_thumb"]


def test_an_address_is_never_cut() -> None:
    address = "https://example.com/" + "a-long-path/" * 12
    said = wrapped(f"as it says at {address}, which is long", 60)
    assert any(address in line for line in said)
    assert all(len(line) <= 60 for line in wrapped("word" * 60 + " and more", 60))


MANY_OF_ONE = re.compile(
    r"(?<![\d.,])1(\.0)? (sequences|tokens(?!/s)|requests|blocks|layers|stages|heads|GPUs|devices|ranks|servers)\b"
    r"|(?<![\d.,])1 (do|need|fit|stay|wait)\b"
)


def test_no_line_speaks_of_one_as_many(ask: Ask, cpu: Callable[..., Device]) -> None:
    tiny = {"max_model_len": 1, "max_num_seqs": 1}
    tight = [
        ask("llama-3.1-8b", "rtx4090", traffic=(2, 30000, 2000)),
        ask("qwen3-32b-awq", "l4"),
        ask("llama-3.1-8b", "l4", max_model_len=8192),
        ask("qwen3-8b", "l4", max_model_len=16000),
        ask("llama-3.1-8b", "l4", max_num_seqs=64, max_model_len=32000),
        ask("llama-3.1-8b", "l4", traffic=(1, 1, 0)),
        ask("llama-3.1-8b", "l4", traffic=(1, 1, 0), max_model_len=8192),
        ask("gemma-3-27b", "l4"),
        ask("llama-3.1-8b", "l4", **tiny),
        ask("llama-3.1-8b", "t4", count=2, pipeline_parallel=2),
        ask("llama-3.1-8b", "t4", count=2, tensor_parallel=1),
        ask("smollm2-135m", device=cpu(0.9)),
        ask("smollm2-135m", device=cpu(1.2), **tiny),
        ask("smollm2-135m", device=cpu(2), max_num_seqs=1),
        ask("smollm2-135m", device=cpu(2), traffic=(1, 1, 0)),
    ]
    for question in tight:
        found = answer(question)
        for line in (*lines(found, width=1000, verbose=True), json.dumps(found.to_json())):
            said = MANY_OF_ONE.search(line)
            assert said is None, line[max(0, said.start() - 80) : said.end() + 40]


def test_warnings_count_too(ask: Ask) -> None:
    """It said that KV holds 1 sequences."""
    found = answer(ask("llama-3.1-8b", "l4", max_num_seqs=64, max_model_len=32000))
    (said,) = [warning.message for warning in found.warnings if warning.code == "HFW25"]
    assert "KV holds 1 sequence of 32,000 tokens" in said


def test_what_is_said_of_copies_ends_where_it_should(ask: Ask) -> None:
    text = " ".join(" ".join(lines(answer(ask("llama-3.1-70b", "h100-80", count=16, tensor_parallel=16)))).split())
    assert "with the copies on all ranks; the pool holds" in text


def test_nothing_is_free_where_it_is_short(ask: Ask, cpu: Callable[..., Device]) -> None:
    """The page that stands for none is of the pool, also of one that is too small."""
    found = answer(ask("smollm2-135m", device=cpu(2), max_model_len=8192, traffic=(64, 4000, 96)))
    (rank,) = found.fit.ranks
    assert not found.fits
    assert rank.null_bytes
    text = lines(found, width=100)
    assert not [line for line in text if line.startswith("  free ")]
    parts = sizes(found, rank)
    assert parts["KV"] == found.fit.needed_bytes(rank) + rank.null_bytes
    used = sum(parts[name] for name in ("weights", "overhead", "KV", "free"))
    assert used == rank.budget_bytes + parts["short"]


def test_numbers_are_not_said_to_be_of_what_is_less(ask: Ask) -> None:
    text = " ".join(" ".join(lines(answer(ask("llama-3.1-70b", "l4")), width=100)).split())
    assert "HFW28 the KV pool has 0 tokens: nothing is left of 19.94 GiB; weights would take" in text
    changed = [way.change for way in answer(ask("llama-3.1-8b", "rtx4090", max_model_len=60000)).ways_out]
    assert "KV in fp8: 1 byte per element instead of 2" in changed
