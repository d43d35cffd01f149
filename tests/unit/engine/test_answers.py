"""One answer as it grows: what is told of a prompt, once and with a None before it, through the death of an engine."""

from holdfast import SamplingParams
from holdfast.engine.requests.output import OutputBuilder
from holdfast.records import EngineOutput, Request, TokenLogprobs


def told(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([token, 9], [-1.0, -0.5], 2) for token in tokens]


def answer(prompt: list[int], count: int | None = 1) -> OutputBuilder:
    params = SamplingParams(prompt_logprobs=count, max_tokens=3)
    return OutputBuilder(Request(request_id="r", prompt_token_ids=prompt, params=params), 0, None)


def test_a_prompt_is_told_of_in_parts_and_goes_on_where_an_engine_died() -> None:
    growing = answer([4, 5, 6, 7])
    assert growing.resumed().prompt_logprobs_sent == 0
    first = growing.take(EngineOutput(request_id="r", prompt_logprobs=told(5, 6)))
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [list(entry or {}) for entry in first.prompt_logprobs] == [[], [5, 9], [6, 9]]
    assert growing.resumed().prompt_logprobs_sent == 2
    second = growing.take(EngineOutput(request_id="r", token_ids=[8], prompt_logprobs=told(7)))
    assert second.prompt_logprobs is not None
    assert [list(entry or {}) for entry in second.prompt_logprobs] == [[7, 9]]
    assert growing.resumed().prompt_logprobs_sent == 3
    assert growing.take(EngineOutput(request_id="r", token_ids=[8])).prompt_logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    growing = answer([4])
    only = growing.take(EngineOutput(request_id="r", token_ids=[8])).prompt_logprobs or ()
    assert list(only) == [None]
    assert growing.take(EngineOutput(request_id="r", token_ids=[8])).prompt_logprobs is None
    assert growing.resumed().prompt_logprobs_sent == 0
    assert answer([4, 5], None).take(EngineOutput(request_id="r", token_ids=[8])).prompt_logprobs is None
