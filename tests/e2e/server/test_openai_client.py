"""The real openai client against the real server: shapes, streams, numbers."""

from __future__ import annotations

import asyncio

import openai
import pytest

from holdfast.engine.fake import FakeEngine, say
from holdfast.records import SamplingParams

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Grüße an alle 🎉"}]
HELLO_TOKENS = len("systembe briefuserGrüße an alle 🎉assistant".encode()) + 5
ANSWER_TOKENS = len("Grüße an alle 🎉".encode()) + 1


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_chat(client, server):
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Grüße an alle 🎉"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens == HELLO_TOKENS
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    assert answer.usage.total_tokens == HELLO_TOKENS + ANSWER_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(model="alias", messages=HELLO)
    assert again.model == "fake"
    assert again.usage.prompt_tokens_details.cached_tokens == HELLO_TOKENS // 16 * 16
    assert again.id != answer.id
    assert server.engine.received[0][1].max_tokens is None


def test_chat_stream_is_one_event_a_token_and_never_half_a_character(client):
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    tokens, usage = chunks[1:-1], chunks[-1]
    assert len(tokens) == ANSWER_TOKENS
    assert "".join(chunk.choices[0].delta.content for chunk in tokens) == "Grüße an alle 🎉"
    assert all("\ufffd" not in chunk.choices[0].delta.content for chunk in tokens)
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in tokens)
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (HELLO_TOKENS, ANSWER_TOKENS)


def test_continuous_usage_counts_up(client):
    stream = client.completions.create(
        model="fake",
        prompt="abc",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    chunks = list(stream)
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 4]


def test_completion_prompts_of_every_kind(client):
    def texts(prompt, **options):
        answer = client.completions.create(model="fake", prompt=prompt, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts("abc") == ["abc"]
    assert texts(["abc", "defg"]) == ["abc", "defg"]
    assert texts([97, 98]) == ["ab"]
    assert texts([[97], [98, 99]]) == ["a", "bc"]
    assert texts(["abc", "de"], n=2) == ["abc", "abc", "de", "de"]
    assert texts(["abc", "de"], echo=True) == ["abcabc", "dede"]
    assert texts([97, 98], echo=True) == ["abab"]
    assert texts("x" * 40) == ["x" * 16]


def test_prompt_logprobs(client):
    """vLLM's shape: a field of every choice of a completion, of the answer of a chat; None for the first token."""
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(model="fake", prompt=["abc", "x"], n=2, max_tokens=1, extra_body=extra)
    first, second, third, fourth = (choice.model_extra["prompt_logprobs"] for choice in answer.choices)
    assert (
        first
        == second
        == [
            None,
            {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
            {"99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"}},
        ]
    )
    assert third == fourth == [None]
    assert answer.choices[0].logprobs is None
    chat = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, extra_body={"prompt_logprobs": 0})
    told = chat.model_extra["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == chat.usage.prompt_tokens
    assert all(len(entry) == 1 for entry in told[1:])
    plain = client.completions.create(model="fake", prompt="abc", max_tokens=1)
    assert plain.choices[0].model_extra["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_tells_of_the_prompt(client, stream, max_tokens):
    """As lm-eval asks: token ids, echo, logprobs, and at most one token of an answer."""
    asked = {"model": "fake", "prompt": [97, 98, 99], "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    got = client.completions.create(
        **asked, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    chunks = list(got) if stream else [got]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    assert "".join(choice.text for choice in choices) == "abc" + "a" * max_tokens
    assert [token for part in parts for token in part.tokens] == ["a", "b", "c", *"a" * max_tokens]
    assert [number for part in parts for number in part.token_logprobs] == [None, -0.25, -0.25, *[-0.25] * max_tokens]
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops[:3] == [None, {"b": -0.25, "c": -0.5}, {"c": -0.25, "d": -0.5}]
    assert [offset for part in parts for offset in part.text_offset] == list(range(3 + max_tokens))
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == max_tokens


def test_words_and_tokens_that_are_allowed_reach_the_engine(client, server):
    extra = {"allowed_token_ids": [97, 98], "bad_words": ["no"], "spaces_between_special_tokens": False}
    client.completions.create(model="fake", prompt="abc", max_tokens=1, extra_body=extra)
    params = server.engine.received[-1][1]
    assert params.allowed_token_ids == [97, 98]
    assert params.bad_words == ["no"]
    assert params.spaces_between_special_tokens is False


def test_completion_stream_of_several_prompts_and_answers(client):
    stream = client.completions.create(model="fake", prompt=["abc", "defg"], n=2, stream=True, echo=True)
    texts = dict.fromkeys(range(4), "")
    finished = {}
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finished[choice.index] = choice.finish_reason
    assert texts == {0: "abcabc", 1: "abcabc", 2: "defgdefg", 3: "defgdefg"}
    assert finished == dict.fromkeys(range(4), "stop")


def test_chat_logprobs(client):
    for stream in (False, True):
        got = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=3, stream=stream
        )
        if stream:
            entries = [entry for chunk in got for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
        else:
            entries = got.choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["G", "r"]
        assert entries[0].bytes == [ord("G")]
        assert entries[0].logprob == -0.25
        assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [
            ("G", -0.25),
            ("H", -0.5),
            ("I", -0.75),
        ]
    none_on_top = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, logprobs=True)
    assert none_on_top.choices[0].logprobs.content[0].top_logprobs == []


def test_completion_logprobs(client):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.top_logprobs[1] == {"b": -0.25, "c": -0.5}
    assert logprobs.text_offset == [0, 1, 2]
    stream = client.completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=2, stream=True)
    assert [chunk.choices[0].logprobs.text_offset for chunk in stream] == [[0], [1], [2]]


def test_stop_reasons(client):
    by_text = client.completions.create(model="fake", prompt="abcdef", stop=["de", "zz"])
    assert (by_text.choices[0].finish_reason, by_text.choices[0].stop_reason) == ("stop", "de")
    by_id = client.completions.create(model="fake", prompt="abcdef", extra_body={"stop_token_ids": [99]})
    assert by_id.choices[0].stop_reason == 99
    by_length = client.completions.create(model="fake", prompt="abcdef", max_tokens=2)
    assert (by_length.choices[0].finish_reason, by_length.choices[0].stop_reason) == ("length", None)


def test_every_sampling_name_reaches_the_engine(client, server):
    wanted = {
        "n": 2,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "stop": ["zz"],
        "stop_token_ids": [0],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"65": -3},
        "user": "me",
        "store": False,
        "tools": [],
        "response_format": {"type": "text"},
    }
    client.chat.completions.create(
        model="fake", messages=HELLO, max_completion_tokens=9, logprobs=True, top_logprobs=4, extra_body=wanted
    )
    params = server.engine.received[0][1]
    expected = SamplingParams(
        **{name: value for name, value in wanted.items() if name not in ("user", "store", "tools", "response_format")}
        | {"logit_bias": {65: -3.0}},
        max_tokens=9,
        logprobs=4,
    )
    assert params == expected


def test_model_defaults_hold_where_a_request_is_silent(launch):
    server = launch(default_sampling={"temperature": 0.25, "top_p": 0.5})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        client.completions.create(model="fake", prompt="a", top_p=0.75)
    params = server.engine.received[0][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.75, 16)


def test_content_parts_developer_and_answers_sent_back(client, server):
    first = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "hi"},
        ],
    )
    history = [{"role": "user", "content": "hi"}, first.choices[0].message.model_dump(), HELLO[1]]
    answer = client.chat.completions.create(model="fake", messages=history)
    assert answer.choices[0].message.content == "Grüße an alle 🎉"
    prompt = bytes(token for token in server.engine.received[0][0] if token < 256).decode()
    assert prompt == "systemabuserhiassistant"


def test_continue_final_message(client, server):
    client.chat.completions.create(
        model="fake",
        messages=[{"role": "assistant", "content": "Once"}],
        extra_body={"continue_final_message": True},
    )
    assert server.engine.received[0][0][-4:] == list(b"Once")


def test_models(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["fake", "alias"]
    assert client.models.retrieve("alias").max_model_len == 4096
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_64_at_once_each_gets_its_own_answer(launch):
    server = launch(FakeEngine(max_num_seqs=16, token_delay_s=0.001))

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        content = f"number {number} says " + "x" * number
        if number % 2:
            answer = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": content}], max_tokens=200
            )
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": content}], stream=True
        )
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        answers = await asyncio.gather(*[one(client, number) for number in range(64)])
    assert answers == [f"number {number} says " + "x" * number for number in range(64)]
    assert server.engine.unfinished == 0
    assert server.engine.aborted == []


def test_a_server_without_tokenizer_takes_token_ids_only(launch):
    server = launch(FakeEngine(say("ok"), with_tokenizer=False))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        assert client.completions.create(model="fake", prompt=[1, 2]).usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            client.completions.create(model="fake", prompt="text")
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            client.chat.completions.create(model="fake", messages=HELLO)
