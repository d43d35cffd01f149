"""Flags after a run that failed: planned before they are named, or why there are none."""

from __future__ import annotations

from typing import Any

from made_up_answers import answer

from holdfast.bench.measure.advice import advice
from holdfast.bench.measure.load_points import LoadPoint, load_points


def safe(at_once: int) -> LoadPoint:
    [point, *_] = load_points([answer(0.05 * at) for at in range(40)])
    return type(point)(**{name: getattr(point, name) for name in point.__struct_fields__} | {"at_once": at_once})


def told(model: str = "smollm2", **changes: Any) -> list[str]:
    known: dict[str, Any] = {
        "url": "http://127.0.0.1:8000", "engine": "holdfast", "asked": (100, 50), "local": True,
        "answers": [answer(0.1 * at) for at in range(9)], "samples": [], "safe": safe(6), "peak_in_flight": 20,
    }  # fmt: skip
    return advice(model, **known | changes)


def test_a_command_for_the_safe_concurrency_is_planned() -> None:
    fewer, command = told()
    assert fewer == "send at most 6 requests at once to one server, or add servers"
    assert command.startswith("planned to hold 6 x 30 tokens: holdfast serve smollm2 ")
    assert "--max-num-seqs 6" in command
    assert told(peak_in_flight=6) == [command]


def test_the_servers_own_flags_are_kept_and_its_key_is_hidden() -> None:
    own = "holdfast serve smollm2 --port 9000 --max-num-seqs 64 --api-key secret --enable-lora"
    _, command = told(command=own)
    assert "holdfast serve smollm2 --port 9000 --max-num-seqs 6 --api-key" in command
    assert "--enable-lora" in command
    assert "secret" not in command
    assert told(command="holdfast serve another --port 9000") == told()
    assert told(command="vllm serve smollm2") == told()


def test_a_server_that_counts_nothing_is_planned_for_what_was_asked() -> None:
    uncounted = [answer(0.1 * at, prompt_tokens=0) for at in range(9)]
    assert "6 x 110 tokens" in told(answers=uncounted)[1]


def test_what_cannot_be_planned_says_why() -> None:
    assert "another machine" in told(local=False)[-1]
    assert "which engine" in told(engine=None)[-1]
    assert "no flags can be planned" in told("no-such-model-anywhere")[-1]
    assert "nothing was answered" in told(answers=[])[-1]
    assert "lowest load" in told(safe=None)[-1]
    assert "holdfast doctor http://127.0.0.1:8000, " in told(safe=None)[-1]
    [gone] = told(ended=True)
    assert "holdfast doctor LOGFILE" in gone
    assert "http" not in gone  # Nobody is there to be asked.
    assert "a longer --peak" in told(safe=None, too_few=True)[-1]
