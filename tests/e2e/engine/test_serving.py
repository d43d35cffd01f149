"""A real server with an engine process of its own, used by real clients: openai, curl."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys

import httpx
import openai
import pytest
from deadlines import PATIENCE_S


@pytest.fixture(scope="module")
def server(module_server, tiny_arguments):
    return module_server(
        *tiny_arguments,
        "--api-key",
        "sesame",
        "--enable-tokenizer-info-endpoint",
        "--runner",
        "pooling",
        forked=False,
    ).wait_ready()


def completion(**changes: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | changes


def test_sync_client(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.create(**completion())
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, logprobs=True, top_logprobs=3
    )
    assert len(chat.choices[0].logprobs.content) == 5
    assert all(len(entry.top_logprobs) == 3 for entry in chat.choices[0].logprobs.content)
    several = client.completions.create(**completion(n=3, temperature=1.0, seed=1))
    assert len({choice.text for choice in several.choices}) > 1
    assert client.completions.create(**completion(n=3, temperature=1.0, seed=1)).choices == several.choices


def test_what_is_told_of_prompts_crosses_the_processes(server) -> None:
    """In chunks: the prompt is longer than a step."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    prompt = [place * place % 4000 + 100 for place in range(700)]
    echoed = client.completions.create(**completion(prompt=prompt, max_tokens=0, echo=True, logprobs=2)).choices[0]
    extra = {"prompt_logprobs": 2}
    asked = client.completions.create(**completion(prompt=prompt, max_tokens=1, n=2), extra_body=extra)
    told = asked.choices[0].model_extra["prompt_logprobs"]
    assert told == asked.choices[1].model_extra["prompt_logprobs"]
    assert len(told) == len(echoed.logprobs.tokens) == len(prompt)
    assert told[0] is echoed.logprobs.token_logprobs[0] is echoed.logprobs.top_logprobs[0] is None
    numbers = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], told[1:], strict=True)]
    assert numbers == pytest.approx(echoed.logprobs.token_logprobs[1:], abs=1e-4)
    assert "".join(echoed.logprobs.tokens[1:5]) == "".join(
        told[at][str(prompt[at])]["decoded_token"] for at in range(1, 5)
    )


def test_words_that_shall_not_be_written(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    plain = client.completions.create(**completion(max_tokens=1)).choices[0].text
    other = client.completions.create(**completion(max_tokens=1), extra_body={"bad_words": [plain]}).choices[0].text
    assert other != plain
    only = client.completions.create(**completion(max_tokens=4), extra_body={"allowed_token_ids": [300]})
    assert (
        only.choices[0].text
        == client.completions.create(**completion(prompt=[300] * 4, max_tokens=0, echo=True)).choices[0].text
    )
    with pytest.raises(openai.BadRequestError, match="leave no token"):
        client.completions.create(**completion(), extra_body={"allowed_token_ids": [2], "min_tokens": 2})
    chosen = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        logprobs=True,
        extra_body={"logprob_token_ids": [300, 500], "allowed_token_ids": [400], "return_tokens_as_token_ids": True},
    )
    told = {entry.token for entry in chosen.choices[0].logprobs.content[0].top_logprobs}
    assert told == {"token_id:300", "token_id:400", "token_id:500"}
    beams = {"use_beam_search": True, "ignore_eos": True}
    searched = client.completions.create(**completion(n=3, max_tokens=5, logprobs=1), extra_body=beams)
    sums = [sum(choice.logprobs.token_logprobs) for choice in searched.choices]
    assert sums == sorted(sums, reverse=True)
    assert len({choice.text for choice in searched.choices}) == 3
    assert searched.usage.completion_tokens == 15


def test_streamed_is_what_is_not_streamed(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    whole = client.completions.create(**completion(max_tokens=40)).choices[0].text
    chunks = list(client.completions.create(stream=True, **completion(max_tokens=40)))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole
    assert len(chunks) >= 40


async def test_64_at_once_do_not_change_each_other(server) -> None:
    """In float32 the answer does not depend on the company a request keeps.

    Batch shapes still change the last bit of a logit. Among ten tokens that decides nothing; among the 49,152 nearly
    equal ones of random weights, one draw in some thousands falls on a boundary that has moved.
    """
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:

        async def ask(place: int) -> str:
            asked = completion(prompt=f"{place} bottles of beer", max_tokens=24, seed=place, temperature=place % 2)
            return (await client.completions.create(extra_body={"top_k": 10}, **asked)).choices[0].text

        together = await asyncio.gather(*(ask(place) for place in range(64)))
        alone = {place: await ask(place) for place in range(0, 64, 3)}
    assert {place: together[place] for place in alone} == alone


def test_what_a_tokenizer_is_and_scores(server) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer sesame"}, timeout=PATIENCE_S) as http:
        told = http.get("/tokenizer_info").json()
        assert told["eos_token"] == "<|im_end|>"
        assert "<|im_start|>" in told["chat_template"]
        assert told["added_tokens_decoder"]["2"] == {"content": "<|im_end|>", "special": True}
        ranked = http.post("/v1/rerank", json={"query": "a cat", "documents": ["a dog", "a cat"]}).json()["results"]
        assert (ranked[0]["index"], ranked[0]["relevance_score"]) == (1, pytest.approx(1, abs=1e-5))
        assert http.post("/classify", json={"input": "a cat"}).status_code == 400


def test_curl(server) -> None:
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Authorization: Bearer sesame"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(completion(stream=True))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    events = re.findall(r"^data: (.*)$", said, re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])


def test_refusals_in_openais_shape(server) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer sesame"}, timeout=PATIENCE_S) as client:

        def refused(**changes: object) -> dict[str, object]:
            answer = client.post("/v1/completions", json=completion(**changes))
            return {"status": answer.status_code, **answer.json()["error"]}

        beyond = refused(max_tokens=5000)
        assert beyond["status"] == 400
        assert "5000" in beyond["message"]
        assert str(1008) in beyond["message"] or "2048" in beyond["message"]
        assert refused(model="other")["status"] == 404
        assert refused(temperature="hot")["param"] == "temperature"
        assert refused(prompt=[10**6])["status"] == 400
        assert refused(guided_regex="(")["code"] == "invalid_value"
    assert httpx.post(f"{server.url}/v1/completions", json=completion(), timeout=PATIENCE_S).status_code == 401


def test_prefix_hits_are_counted(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame")
    prompt = list(range(1000, 1200))
    cold = client.completions.create(**completion(prompt=prompt))
    warm = client.completions.create(**completion(prompt=prompt))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 192
    assert warm.choices[0].text == cold.choices[0].text
    salted = client.completions.create(**completion(prompt=prompt, extra_body={"cache_salt": "mine"}))
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_the_front_has_no_torch(server) -> None:
    with open(f"/proc/{server.process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    with open(f"/proc/{server.engine_pid}/maps") as maps:
        assert "libtorch" in maps.read()


def test_lines_people_look_for(server) -> None:
    for part in ("KV blocks:", "KV cache size:", "Maximum concurrency", "Decision: sampling defaults"):
        assert part in server.log
    start = server.log.partition("(try: curl")[0]
    for part in ("Attention backend:", "Decision: dtype", "unaccounted"):
        assert part not in start
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert any(line["prompt_tokens"] and line["completion_tokens"] for line in lines)


@pytest.fixture(scope="module")
def small(module_server, endless_arguments):
    """Eight run, three wait, and all are let finish when it is stopped."""
    limits = ("--max-num-seqs", "8", "--max-queued-requests", "3", "--drain-timeout", str(PATIENCE_S))
    return module_server(*endless_arguments, *limits).wait_ready()


def test_a_client_that_leaves_frees_its_pages(small) -> None:
    asked = completion(max_tokens=60_000, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{small.url}/v1/completions", json=asked, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()  # Held: httpx closes the connection when the iterator is dropped.
        next(lines)
        with small.engine_held():
            assert small.metric("vllm:num_requests_running") == 1
    small.wait_metric("vllm:num_requests_running", lambda running: running == 0)
    small.wait_metric("vllm:kv_cache_usage_perc", lambda share: share == 0)


async def test_the_queue_has_a_bound(small) -> None:
    async with httpx.AsyncClient(base_url=small.url, timeout=PATIENCE_S) as client:
        asked = completion(max_tokens=20, ignore_eos=True)
        with small.engine_held():
            running = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(18)]
            async with asyncio.timeout(PATIENCE_S):
                while sum(task.done() for task in running) < 7:
                    await asyncio.sleep(0.01)
        answers = await asyncio.gather(*running)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 11
    assert statuses.count(429) == 7
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers if answer.status_code == 429)


async def test_sigterm_under_load_drains_and_refuses_newcomers(small) -> None:
    """The last of those that share the server."""
    async with httpx.AsyncClient(base_url=small.url, timeout=PATIENCE_S) as client:
        asked = completion(max_tokens=100, ignore_eos=True)
        with small.engine_held():
            running = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(8)]
            async with asyncio.timeout(PATIENCE_S):
                while small.open_requests() < 8:
                    await asyncio.sleep(0.01)
                small.process.send_signal(signal.SIGTERM)
                while (await client.get("/health")).json()["status"] != "draining":
                    await asyncio.sleep(0.01)
            refused = await client.post("/v1/completions", json=completion())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert not any(task.done() for task in running)
        answers = await asyncio.gather(*running)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * 8
    assert small.process.wait(PATIENCE_S) == 0


def test_a_bad_start_is_said_at_once(tiny_model) -> None:
    def start(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stderr

    code, said = start("-m", "holdfast", "serve", "--port", "0", "/nowhere/at/all.gguf")
    assert code in (1, 2)
    assert "HF" in said
    assert "Traceback" not in said
    # Others in one process, which has no engine process begin ahead of its settings.
    tiny = ["serve", "--port", "0", str(tiny_model)]
    bad = [[*tiny, "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "999999"], tiny]
    each = f"import sys; from holdfast.cli.main import main; sys.exit(sum(main(words) for words in {bad!r}))"
    code, said = start("-c", each)
    assert code == 2 + 2
    assert "2,048" in said
    assert "--load-format dummy" in said
