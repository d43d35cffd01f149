"""Log-probabilities of answers that are not streamed are kept within a bound that the plan counts."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.engine.fake import FakeEngine, say
from holdfast.footprint.cpu import KEPT_ENTRIES, KEPT_ENTRY_BYTES
from holdfast.records import AnswerDelta, Logprob
from holdfast.server.request import logprob_budget
from holdfast.server.request.logprob_budget import OF_A_TOKEN
from holdfast.server.response.serialize import ChatShape, CompletionShape, ResponseChoice

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "?"}], "logprobs": True, "top_logprobs": 5}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": KEPT_ENTRIES // 23 + 1, "logprobs": 20}),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 4, "max_tokens": KEPT_ENTRIES // 23 // 8 + 1, "logprobs": 20}),
        (CHAT, {**LONG, "max_tokens": KEPT_ENTRIES // 8 + 1}),
    ],
)
def test_more_than_can_be_kept_is_refused_before_it_is_computed(launch, path: str, body: dict[str, Any]) -> None:
    with launch(FakeEngine(max_model_len=1_000_000)).client() as http:
        refused = http.post(path, json=body)
        assert refused.status_code == 400, refused.text[:500]
        assert refused.json()["error"]["param"] == "max_tokens"
        assert "stream: true" in refused.json()["error"]["holdfast"]["fix"]


def test_an_answer_that_outgrows_the_room_is_ended_and_gives_it_back(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody said how long it may get."""
    monkeypatch.setattr(logprob_budget, "KEPT_ENTRIES", 2000)
    with launch(FakeEngine(say("x" * 3000), max_model_len=10_000)).client() as http:
        for _ in range(2):
            ended = http.post(CHAT, json=LONG)
            assert ended.status_code == 429, ended.text[:500]
            assert "stream: true" in ended.json()["error"]["holdfast"]["fix"]
        short = http.post(CHAT, json={**LONG, "max_tokens": 200}).json()
        assert len(short["choices"][0]["logprobs"]["content"]) == 200
        with http.stream("POST", CHAT, json={**LONG, "stream": True}) as answer:
            assert sum(line.startswith("data: {") for line in answer.iter_lines()) > 3000


@pytest.mark.parametrize("likeliest", [0, 1, 20])
@pytest.mark.parametrize("shape", [ChatShape, CompletionShape])
def test_what_is_kept_takes_no_more_than_is_counted(shape: Any, likeliest: int) -> None:
    """One token at a time, as they come."""
    dice, tokens = random.Random(likeliest), 2000
    ask: Any = SimpleNamespace(
        answer_id="a",
        created=0,
        model="m",
        logprobs=likeliest,
        echoes=None,
        with_token_ids=False,
        tokens_as_ids=False,
        bytes_of=lambda token: b" token" + bytes([token % 99]),
    )
    made, answer = shape(ask), ResponseChoice(0, cast(Any, None))
    entries = [
        {dice.randrange(10**5): Logprob(-dice.random(), 1, f" word{place}") for place in range(likeliest + 1)}
        for _ in range(tokens)
    ]
    tracemalloc.start()
    for entry in entries:
        made.keep(answer, AnswerDelta(logprobs=[entry]))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < tokens * (likeliest + 1 + OF_A_TOKEN) * KEPT_ENTRY_BYTES
    print(f"{held_bytes / (tokens * (likeliest + 1 + OF_A_TOKEN)):.0f} bytes an entry")
