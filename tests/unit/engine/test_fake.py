"""The public fake behaves as the real engine does where a client could tell."""

from __future__ import annotations

from holdfast import SamplingParams
from holdfast.engine.fake import FakeEngine, say
from holdfast.records import FinishReason


async def test_stop_strings_are_held_back_and_cut_with_times() -> None:
    engine = FakeEngine(say("one two three"))
    await engine.start()
    params = SamplingParams(max_tokens=50, stop=["two"], n=2)
    deltas = [delta async for delta in await engine.generate([1], params, request_id="r")]
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == "one "
        assert sum(len(delta.token_ids) for delta in mine) == 7
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (FinishReason.STOP, "two")
        assert all(delta.timing is None for delta in mine[:-1])
        timing = mine[-1].timing
        assert timing is not None
        assert timing.arrival_s <= timing.scheduled_s <= timing.first_token_s <= timing.finished_s
    assert engine.finished == ["r"]
    assert engine.unfinished == 0


async def test_ends_and_logprobs() -> None:
    engine = FakeEngine(say("ab"))
    await engine.start()
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
    deltas = [delta async for delta in await engine.generate([1], params, request_id="r")]
    assert [delta.text for delta in deltas] == ["a", "b", "", "a", "b"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[0].logprobs is not None
    entry = deltas[0].logprobs[0]
    assert [(logprob.rank, logprob.decoded_token) for logprob in entry.values()] == [(1, "a"), (2, "b")]
