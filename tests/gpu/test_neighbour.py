"""Somebody else takes the GPU's memory: while we run, and while we start."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast import LLM, SamplingParams
from holdfast.engine.startup import build_gpu
from holdfast.errors import DoesNotFitError
from holdfast.hardware.nvidia import probe, process_bytes
from holdfast.units import GIB, MIB

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "max_model_len": 4096,
    "max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_prefix_caching": False,
}  # fmt: skip
REQUESTS = 96


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that make chunks and mixed steps, batches of many sizes, every third with log-probabilities."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 100_000) for _ in range(rng.randrange(3, 900))] for _ in range(REQUESTS)]
    params = [
        SamplingParams(
            temperature=0.7,
            seed=number,
            max_tokens=3 + number,
            ignore_eos=True,
            top_k=3,
            logprobs=20 if number % 3 == 0 else None,
            repetition_penalty=1.1 if number % 8 == 0 else 1.0,
        )
        for number in range(REQUESTS)
    ]
    return prompts, params


Answers = list[tuple[str | None, list[int]]]


def answers(llm: LLM) -> Answers:
    prompts, params = work()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [(output.outputs[0].finish_reason, output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def undisturbed(shape: Callable[[str], str]) -> Answers:
    """In float32, where what is computed beside it changes no token of a sequence."""
    with LLM(model=shape("1B"), vram="16GiB", **SETTINGS) as llm:
        found = answers(llm)
    assert [(reason, len(tokens)) for reason, tokens in found] == [("length", 3 + n) for n in range(REQUESTS)]
    return found


@pytest.mark.parametrize("keeps", [True, False], ids=["as it is", "nothing kept"])
def test_who_takes_all_that_is_left_stops_nobody(
    shape: Callable[[str], str], neighbour: Any, undisturbed: Answers, keeps: bool, caplog: Any
) -> None:
    """Nothing but the first graphs is captured when it happens. As it is, torch keeps what the profile run took, and
    everybody finishes; without that too, nobody is disturbed by those who do not."""
    with LLM(model=shape("1B"), vram="16GiB", **SETTINGS) as llm:
        if not keeps:
            torch.cuda.empty_cache()
        left = neighbour.take(0)
        assert left < 64 * MIB
        found = answers(llm)
        assert found == undisturbed or not keeps
        assert keeps or "the step is split" in caplog.text
        short = [number for number, (reason, _) in enumerate(found) if reason == "error"]
        # Only what asks for log-probabilities needs memory of its own in a step.
        assert all(number % 3 == 0 for number in short)
        assert [one for number, one in enumerate(found) if number not in short] == [
            one for number, one in enumerate(undisturbed) if number not in short
        ]
        print(f"with {left / MIB:.0f} MiB left on the GPU {len(short)} of {REQUESTS} ended")
        neighbour.end()
        assert answers(llm) == undisturbed


@pytest.mark.parametrize("moment", ["load", "profile_run", "capture"])
def test_who_takes_memory_during_a_start_does_not_stop_it(
    shape: Callable[[str], str], neighbour: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Answers, moment: str
) -> None:
    """All but 12 GiB are taken at that moment of a start that was planned for far more."""
    free = _at(moment, lambda: neighbour.take(12 * GIB), monkeypatch)
    settings = SETTINGS | {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    with LLM(model=shape("1B"), gpu_memory_utilization=0.5, **settings) as llm:
        assert free
        memory = llm.info.memory
        assert memory is not None
        print(f"{moment}: {llm.info.kv_pool_bytes / GIB:.2f} GiB of KV; plan {memory.budget_bytes / GIB:.2f} GiB")
        assert llm.info.kv_pool_bytes < 16 * GIB
        assert answers(llm) == undisturbed


def test_a_start_that_became_impossible_is_refused_with_numbers(
    shape: Callable[[str], str], neighbour: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Answers
) -> None:
    _at("load", lambda: neighbour.take(512 * MIB), monkeypatch)
    with pytest.raises(DoesNotFitError) as refusal:
        LLM(model=shape("8B"), gpu_memory_utilization=0.5, **SETTINGS)
    print(refusal.value)
    assert "GiB" in str(refusal.value.needed)
    assert refusal.value.found
    assert refusal.value.fix
    neighbour.end()
    torch.cuda.empty_cache()
    with LLM(model=shape("1B"), vram="12GiB", **SETTINGS) as llm:
        assert answers(llm) == undisturbed


def test_who_frees_memory_during_a_start_does_not_stop_it(
    shape: Callable[[str], str], neighbour: Any, monkeypatch: pytest.MonkeyPatch, undisturbed: Answers
) -> None:
    neighbour.take(16 * GIB)
    _at("profile_run", lambda: neighbour.end() or 1, monkeypatch)
    with LLM(model=shape("1B"), **SETTINGS) as llm:
        assert answers(llm) == undisturbed


def _at(moment: str, act: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Once, when a start comes to this stage. What `act` gave is in the list by then."""
    build, said = build_gpu._build, list[int]()

    def watched(config: Any, files: Any, spec: Any, plan: Any, memory: Any, progress: Any) -> Any:
        def told(stage: str, done: int, total: int) -> None:
            if stage == moment and not said:
                said.append(act())
            progress(stage, done, total)

        return build(config, files, spec, plan, memory, told)

    monkeypatch.setattr(build_gpu, "_build", watched)
    return said


def test_a_closed_engine_gives_its_memory_back(shape: Callable[[str], str]) -> None:
    uuid = probe().gpus[0].uuid

    def held() -> int:
        return process_bytes(uuid, os.getpid()) or 0

    with LLM(model=shape("1B"), vram="12GiB", **SETTINGS) as llm:
        answers(llm)
        assert held() > 8 * GIB
    first = held()
    with LLM(model=shape("1B"), vram="12GiB", **SETTINGS) as llm:
        answers(llm)
    print(f"{first / MIB:.0f} MiB after the first, {held() / MIB:.0f} after the second")
    assert held() < 1.5 * GIB  # The context, and code that was loaded.
    assert held() - first < 64 * MIB
