"""Limits that nobody set: the defaults, else the highest that leave room, with the reason; one rule everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.engine import CPU_SEQUENCES, CPU_STEP_TOKENS, GPU_SEQUENCES, GPU_STEP_TOKENS, EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.hardware import Memory, Processor
from holdfast.models import catalogue, describe_config
from holdfast.planner import make_cpu_plan
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.report.answer import answer
from holdfast.planner.sizing.default_limits import CPU_RUNGS, GPU_RUNGS, check_step, choose, ladder
from holdfast.units import GIB, MIB

Ask = Callable[..., Question]


def reasons(found: Plan) -> dict[str, str]:
    return {decision.field: decision.reason for decision in found.decisions}


def limits(found: Plan) -> tuple[int, int]:
    return found.limits.max_num_seqs, found.limits.max_num_batched_tokens


# The rule


def test_the_first_rung_has_the_defaults_and_the_others_less_and_less() -> None:
    for rungs, first in ((GPU_RUNGS, (GPU_SEQUENCES, GPU_STEP_TOKENS)), (CPU_RUNGS, (CPU_SEQUENCES, CPU_STEP_TOKENS))):
        assert (rungs[0].sequences, rungs[0].step_tokens) == first
        for higher, lower in pairwise(rungs):
            assert lower.sequences < higher.sequences
            assert lower.step_tokens < higher.step_tokens
            assert lower.worth_tokens <= higher.worth_tokens


def test_what_is_set_stays() -> None:
    assert {rung.sequences for rung in ladder("gpu", sequences=7, step_tokens=None, least_tokens=1)} == {7}
    assert {rung.step_tokens for rung in ladder("gpu", sequences=None, step_tokens=99, least_tokens=1)} == {99}
    assert len(ladder("cpu", sequences=7, step_tokens=99, least_tokens=1)) == 1


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        ({0: 9000}, 0),
        ({0: 8192, 1: 20_000}, 0),
        ({0: 5000, 1: 7000}, 1),
        ({0: 3000, 1: 3500, 2: 6000}, 2),
        ({0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 4096}, 5),
        ({0: 100, 5: 4000}, 5),
        ({0: 4500, 1: 4500}, 0),
    ],
)
def test_the_first_rung_that_gives_the_longest_context_it_is_worth(held: Mapping[int, int], chosen: int) -> None:
    rungs = ladder("gpu", sequences=None, step_tokens=None, least_tokens=4096)
    most = [max(size for at, size in held.items() if at <= index) for index in range(len(rungs))]
    assert choose(rungs, lambda index: min(most[index], rungs[index].worth_tokens), 4096) == chosen


# On GPUs


def test_smaller_limits_are_taken_where_the_defaults_do_not_fit(ask: Ask, gpu: Callable[..., Device]) -> None:
    """24 GB of which all can be used: the weights leave 3 GiB, and a step of 8,192 tokens alone takes two of them."""
    found = fit(ask("qwen3-32b-awq", device=gpu("rtx4090", total_bytes=24 * GIB, free_bytes=24 * GIB)))
    assert found.fits
    length = found.limits.max_model_len
    assert 4096 <= length <= 8192
    sequences, _ = limits(found)
    assert sequences < 256
    assert reasons(found)["max_num_seqs"] == f"256 do not fit with a context of {length:,} tokens; {sequences} do"
    assert reasons(found)["max_num_batched_tokens"].startswith("8,192 do not fit with")
    assert found.longest_tokens >= 4096
    as_set = replace(found.question, settings=Settings(max_num_seqs=256, max_num_batched_tokens=8192))
    assert not fit(as_set).fits, "what is set is not changed"


def test_the_commands_say_what_was_chosen(ask: Ask, gpu: Callable[..., Device]) -> None:
    question = ask("qwen3-32b-awq", device=gpu("rtx4090", total_bytes=24 * GIB, free_bytes=24 * GIB))
    found = answer(question)
    sequences, step = limits(found.fit)
    for engine in ("holdfast", "vllm"):
        assert f"--max-num-seqs {sequences} " in found.commands[engine].text + " "
        assert f"--max-num-batched-tokens {step} " in found.commands[engine].text + " "


def test_a_context_that_is_asked_for_is_worth_lower_limits(ask: Ask) -> None:
    open_ = fit(ask("llama-3.1-8b", "rtx4090"))
    assert limits(open_) == (256, 8192)
    longer = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=open_.limits.max_model_len + 4096))
    assert longer.fits
    assert limits(longer) < (256, 8192)
    assert "do not fit with a context of" in reasons(longer)["max_num_seqs"]
    assert fit(ask("llama-3.1-8b", "rtx4090", max_model_len=open_.longest_tokens)).fits
    assert f"{open_.longest_tokens:,} with lower limits" in reasons(open_)["max_model_len"]


def test_idle_gpus_are_used_before_limits_are_lowered(ask: Ask) -> None:
    one = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=38_000))
    assert limits(one) < (256, 8192)
    two = fit(ask("llama-3.1-8b", "rtx4090", count=2, max_model_len=38_000))
    assert (two.tensor_parallel, limits(two)) == (2, (256, 8192))


def test_traffic_keeps_its_sequences_and_gives_up_tokens_a_step(ask: Ask) -> None:
    many = int(fit(ask("llama-3.1-8b", "rtx4090", traffic=(1, 2000, 500))).concurrency(2500)) + 1
    found = fit(ask("llama-3.1-8b", "rtx4090", traffic=(many, 2000, 500)))
    assert found.fits
    assert found.limits.max_num_seqs == many
    assert found.limits.max_num_batched_tokens < 8192
    assert "with the traffic" in reasons(found)["max_num_batched_tokens"]


def test_what_does_not_fit_at_all_is_short_by_the_least(ask: Ask) -> None:
    found = fit(ask("llama-3-70b", "rtx4090"))
    assert not found.fits
    assert limits(found) == (1, 256)
    assert reasons(found)["max_num_seqs"] == "not even 1 would fit with a context of 4,096 tokens"


@cache
def model_of(name: str) -> PlannedModel:
    return PlannedModel(name=name, spec=describe_config(catalogue.find(name).config), origin="catalogue")


@given(
    st.sampled_from(["qwen3-32b-awq", "llama-3.1-8b", "gemma-3-12b", "smollm2-135m", "deepseek-v2-lite"]),
    st.sampled_from(["gpu", "cpu"]),
    st.integers(300 * MIB, 80 * GIB),
    st.integers(1, 2 * GIB),
    st.none()
    | st.builds(
        Traffic, concurrency=st.integers(1, 9), prompt_tokens=st.integers(1, 3000), output_tokens=st.integers(0, 99)
    ),
)
@settings(max_examples=examples(150), deadline=None)
def test_neither_the_context_nor_the_limits_shrink_when_memory_grows(
    name: str, kind: str, size: int, more: int, traffic: Traffic | None
) -> None:
    def found(total: int) -> Plan:
        device = Device(index=0, name="d", kind=kind, total_bytes=total, free_bytes=total)  # type: ignore[arg-type]
        machine = Machine(devices=(device,))
        return fit(Question(model=model_of(name), machine=machine, traffic=traffic))

    before, after = found(size), found(size + more)
    assert after.fits >= before.fits
    assert after.short_bytes <= before.short_bytes
    assert after.limits.max_model_len >= before.limits.max_model_len
    assert after.longest_tokens >= before.longest_tokens
    assert after.longest_tokens >= after.limits.max_model_len
    if before.fits and after.limits.max_model_len == before.limits.max_model_len:
        assert limits(after) >= limits(before)


# On a CPU, where `serve` takes the same


def test_serve_lowers_what_is_not_set_and_says_so() -> None:
    spec = model_of("smollm2-135m").spec
    processor = Processor(model="", cores=2, features=frozenset({"asimddp"}))
    memory = Memory(total_bytes=8 * GIB, available_bytes=8 * GIB, limited_by="machine")

    def served(**asked: object) -> tuple[tuple[int, int], int, dict[str, str]]:
        plan = make_cpu_plan(spec, None, EngineConfig.from_arguments(**asked), memory, processor, compiled_kernels=True)
        found = plan.limits
        said = {decision.field: decision.reason for decision in plan.decisions}
        return (found.max_num_seqs, found.max_num_batched_tokens), found.max_model_len, said

    assert served(ram="2GiB")[0] == (CPU_SEQUENCES, CPU_STEP_TOKENS)
    lowered, length, said = served(ram="1280MiB")
    assert lowered < (CPU_SEQUENCES, CPU_STEP_TOKENS)
    assert said["max_num_seqs"] == f"64 do not fit with a context of {length:,} tokens; {lowered[0]} do"
    kept, shorter, _ = served(ram="1280MiB", max_num_seqs=64, max_num_batched_tokens=512)
    assert kept == (64, 512)
    assert shorter < length
    lengths = [served(ram=f"{size}MiB")[1] for size in range(1184, 1524, 10)]
    assert lengths == sorted(lengths)


def test_a_step_has_a_token_for_every_sequence() -> None:
    """Else the scheduler would refuse, after everything was loaded."""
    for kind in ("cpu", "gpu"):
        many = ladder(kind, sequences=10_000, step_tokens=None, least_tokens=512)
        assert {(rung.sequences, rung.step_tokens) for rung in many} == {(10_000, 10_000)}
        short = ladder(kind, sequences=None, step_tokens=8, least_tokens=512)
        assert all(rung.sequences <= 8 == rung.step_tokens for rung in short)
    check_step(8, 8)
    with pytest.raises(ConfigurationError, match="a token for every running sequence"):
        check_step(9, 8)
    assert EngineConfig(device="cpu", max_num_seqs=4096).step_tokens == 4096
    assert EngineConfig(device="cpu", max_num_batched_tokens=8).sequences == 8
