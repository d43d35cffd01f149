"""`LLM` as scripts use it: vLLM's names and shapes, the founding documents' code, and memory given back."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast import LLM, AsyncLLMEngine, PoolingParams, SamplingParams
from holdfast.errors import ConfigurationError, ContextLengthError, EngineError, RequestError, UnsupportedOptionError
from holdfast.execution import native
from holdfast.execution.transformer import Transformer
from holdfast.sampling_params import RequestOutputKind

pytestmark = pytest.mark.usefixtures("forked_starts")


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(
        model=str(tiny_model),
        load_format="dummy",
        tokenizer="smollm2",
        max_model_len=512,
        max_num_seqs=8,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        tensor_parallel_size=1,
        kv_cache_memory_bytes="16MiB",
        dtype="float32",
        max_logprobs=-1,
    ) as made:
        yield made


def test_the_founding_code_runs_unchanged(llm) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    params = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        top_k=50,
        max_tokens=32,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        stop=["</s>"],
        seed=42,
        logprobs=5,
    )
    (output,) = llm.generate([prompt], params)
    answer = output.outputs[0]
    assert output.finished
    assert output.prompt == prompt
    assert len(answer.token_ids) == len(answer.logprobs) <= 32
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entry
        assert 5 <= len(entry) <= 6
        assert entry[token].logprob <= 0
        assert entry[token].rank >= 1
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    )


def test_logprobs_of_tokens_by_their_ids(llm) -> None:
    """The chosen one first, then those that were named: what the likeliest are told with is the same number."""
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
    (free,) = llm.generate("The sea", asked)
    named = [token for token in free.outputs[0].logprobs[0] if token != free.outputs[0].token_ids[0]][-3:]
    (told,) = llm.generate("The sea", asked.replace(logprobs=0, logprob_token_ids=[*named, 11]))
    first = told.outputs[0].logprobs[0]
    assert list(first) == list(dict.fromkeys([told.outputs[0].token_ids[0], *named, 11]))
    assert told.outputs[0].token_ids == free.outputs[0].token_ids
    for token in named:
        assert first[token].logprob == pytest.approx(free.outputs[0].logprobs[0][token].logprob, abs=1e-5)
        assert first[token].rank is None
    with pytest.raises(RequestError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[5])
    with pytest.raises(RequestError, match="out of vocabulary"):
        llm.generate("The sea", asked.replace(logprob_token_ids=[10**9]))


def test_prompts_are_told_of_token_by_token(llm) -> None:
    """None first; the token itself and the likeliest; several answers, cached or not, change nothing of it."""
    prompt = llm.get_tokenizer().encode("The quick brown fox jumps over the lazy dog, again and again and again.")
    plain = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate({"prompt_token_ids": prompt}, plain)
    (told,) = llm.generate({"prompt_token_ids": prompt}, plain.replace(prompt_logprobs=2, n=3))
    assert told.prompt_logprobs is not None
    assert told.prompt_logprobs[0] is None
    assert len(told.prompt_logprobs) == len(prompt)
    for token, entry in zip(prompt[1:], told.prompt_logprobs[1:], strict=True):
        assert 2 <= len(entry) <= 3
        assert entry[token].rank >= 1
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
        assert sorted(one.rank for one in entry.values())[:2] == [1, 2]
    # What a token of an answer is told of is what it is told of as part of a prompt.
    (answer,) = llm.generate({"prompt_token_ids": prompt}, plain.replace(max_tokens=3, logprobs=3))
    spoken = answer.outputs[0]
    longer = {"prompt_token_ids": prompt + spoken.token_ids}
    (again,) = llm.generate(longer, plain.replace(prompt_logprobs=3))
    for one, other in zip(spoken.logprobs, again.prompt_logprobs[-3:], strict=True):
        assert one.keys() == other.keys()
        for token, entry in one.items():
            assert other[token].logprob == pytest.approx(entry.logprob, abs=1e-3)
    assert answer.prompt_logprobs is None
    assert llm.generate([[5]], plain.replace(prompt_logprobs=0))[0].prompt_logprobs == [None]
    (own,) = llm.generate({"prompt_token_ids": prompt}, plain.replace(prompt_logprobs=0))
    assert [list(entry) for entry in own.prompt_logprobs[1:]] == [[token] for token in prompt[1:]]


def test_prompts_in_every_form_give_the_same(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode("Once upon a time")
    forms = ["Once upon a time", {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    answers = [output.outputs[0].token_ids for output in llm.generate(forms, params, use_tqdm=False)]
    answers.append(llm.generate(ids, params)[0].outputs[0].token_ids)
    answers.append(llm.generate(prompt_token_ids=[ids], sampling_params=params)[0].outputs[0].token_ids)
    assert all(answer == answers[0] for answer in answers)
    assert llm.generate("Once upon a time", params)[0].num_cached_tokens == 0  # shorter than a block


def test_one_params_each_and_several_answers(llm) -> None:
    prompts = [{"prompt_token_ids": [place, 5, 6]} for place in range(3)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def test_only_what_is_allowed_and_never_a_bad_word(llm) -> None:
    prompt = {"prompt_token_ids": [7, 8, 9]}
    free = SamplingParams(max_tokens=48, ignore_eos=True, seed=3, temperature=100)
    allowed = [300, 301, 302, 5000]
    (output,) = llm.generate(prompt, free.replace(allowed_token_ids=allowed, n=2))
    for answer in output.outputs:
        assert set(answer.token_ids) <= set(allowed)
        assert len(set(answer.token_ids)) > 1
    spell = llm.get_tokenizer().encode
    cat, dog = spell(" cat", add_special_tokens=False), spell(" hot dog", add_special_tokens=False)
    assert [len(cat), len(dog)] == [1, 2]
    (output,) = llm.generate(prompt, free.replace(allowed_token_ids=[*cat, *dog]))
    assert "cat" in output.outputs[0].text
    assert "hot dog" in output.outputs[0].text
    (output,) = llm.generate(prompt, free.replace(allowed_token_ids=[*cat, *dog, 300], bad_words=["cat", "hot dog"]))
    assert cat[0] not in output.outputs[0].token_ids
    assert "hot dog" not in output.outputs[0].text
    assert "hot" in output.outputs[0].text
    assert "dog" in output.outputs[0].text


def test_how_an_answer_is_written(llm) -> None:
    tokenizer = llm.get_tokenizer()
    end, word = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.encode(" tea", add_special_tokens=False)[0]
    prompt = {"prompt_token_ids": [7, 8, 9]}
    base = SamplingParams(max_tokens=12, ignore_eos=True, seed=5, temperature=50.0, allowed_token_ids=[end, word])
    (hidden,), (shown,), (ids,) = (
        llm.generate(prompt, base.replace(**change))
        for change in (
            {},
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            {"detokenize": False},
        )
    )
    tokens = hidden.outputs[0].token_ids
    assert tokens == shown.outputs[0].token_ids == ids.outputs[0].token_ids
    assert 0 < tokens.count(end) < 12
    assert hidden.outputs[0].text.count("tea") == shown.outputs[0].text.count("tea") == tokens.count(word)
    assert "<|im_end|>" not in hidden.outputs[0].text
    assert shown.outputs[0].text == "".join({end: "<|im_end|>", word: " tea"}[token] for token in tokens)
    assert ids.outputs[0].text == ""
    for included, text in ((False, ""), (True, " tea")):
        (stopped,) = llm.generate(
            prompt, base.replace(stop=[" tea"], include_stop_str_in_output=included, allowed_token_ids=[word])
        )
        assert stopped.outputs[0].text == text
        assert stopped.outputs[0].stop_reason == " tea"


def test_answers_to_one_prompt_share_its_pages(llm) -> None:
    """Pages of a prompt are there once, whatever the number of its answers: of 8 answers each has a page of its own."""
    block = llm.info.block_size
    prompt = [(31 * place) % 400 + 100 for place in range(12 * block + 3)]
    llm.reset_prefix_cache()
    used = []
    step = llm._core.step

    def watched():
        outputs = step()
        used.append(llm.get_stats().blocks_used)
        return outputs

    llm._core.step = watched
    try:
        (output,) = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(n=8, max_tokens=6, ignore_eos=True, seed=1)
        )
    finally:
        del llm._core.step
    assert len(output.outputs) == 8
    assert max(used) == 12 + 8


def test_limits_of_the_output(llm) -> None:
    (output,) = llm.generate([{"prompt_token_ids": [7] * 500}], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12  # the context ends it, as in vLLM
    assert output.outputs[0].finish_reason == "length"
    free = llm.generate([{"prompt_token_ids": [7]}], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    text = free[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (stopped,) = llm.generate(
        [{"prompt_token_ids": [7]}], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop=stop)
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    token = free[0].outputs[0].token_ids[4]
    first = free[0].outputs[0].token_ids.index(token)
    (stopped,) = llm.generate(
        [{"prompt_token_ids": [7]}],
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[token]),
    )
    assert stopped.outputs[0].token_ids == free[0].outputs[0].token_ids[: first + 1]
    assert stopped.outputs[0].stop_reason == token
    (kept,) = llm.generate(
        [{"prompt_token_ids": [7]}],
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[token], min_tokens=first + 2),
    )
    assert len(kept.outputs[0].token_ids) >= first + 2


def test_bad_requests_lose_nothing(llm) -> None:
    good = {"prompt_token_ids": [1, 2, 3]}
    image = {"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}
    for bad in ({"prompt_token_ids": []}, {"prompt_token_ids": [10**9]}, {"text": "?"}, image):
        with pytest.raises(RequestError):
            llm.generate([good, bad], SamplingParams(max_tokens=2))
    with pytest.raises(ContextLengthError):
        llm.generate([{"prompt_token_ids": [1] * 512}])
    with pytest.raises(RequestError):
        llm.generate([good, good], [SamplingParams()])
    with pytest.raises(UnsupportedOptionError):
        SamplingParams(logits_processors=[print])
    with pytest.raises(UnsupportedOptionError, match="first come, first served"):
        llm.generate([good, good], SamplingParams(max_tokens=2), priority=[0, 1])
    with pytest.raises(RequestError, match="priorities"):
        llm.generate([good, good], SamplingParams(max_tokens=2), priority=[0])
    assert llm.get_stats().running == 0
    assert llm.get_stats().blocks_used == 0
    assert len(llm.generate([good], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["submit", "schedule", "apply"])
def test_an_interruption_anywhere_leaves_a_good_engine(llm, monkeypatch, raised, place) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": [place, *range(100, 140)]} for place in range(3)]
    expected = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
    steps = llm.get_stats().steps_total
    llm.reset_prefix_cache()
    core = llm._core
    target = core.runner if place == "submit" else core.scheduler
    real, calls = getattr(target, place), iter(range(1000))

    def stopped(*arguments):
        # Either the first step never runs, which was to fill blocks that are in the index by now; or a later one is
        # stopped in the middle of the books.
        if place == "submit":
            raise raised
        found = real(*arguments)
        if next(calls) < 5:
            return found
        raise raised

    monkeypatch.setattr(target, place, stopped)
    with pytest.raises(raised):
        llm.generate(asked, params)
    monkeypatch.undo()
    assert llm.get_stats().running == llm.get_stats().waiting == llm.get_stats().blocks_used == 0
    assert llm.get_stats().steps_total >= steps
    assert [output.outputs[0].token_ids for output in llm.generate(asked, params)] == expected


def test_chat_with_one_and_several_conversations(llm) -> None:
    one = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (alone,) = llm.chat(one, params)
    both = llm.chat([one, [{"role": "system", "content": "Be brief."}, *one]], params)
    assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(both) == 2


def test_chat_shows_tools_calls_and_their_answers(llm) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    (output,) = llm.chat(asked, SamplingParams(max_tokens=1), tools=[tool], use_tqdm=False)
    prompt = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert '{"name": "add", "parameters": {"type": "object", "properties": {}}}' in prompt
    assert '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1}}<|im_end|>' in prompt
    assert "<|im_start|>user\nadd answered:\n2<|im_end|>" in prompt


@pytest.mark.parametrize(("by_kernels", "computing"), [(True, (1, 3)), (False, (3, 3))])
def test_torch_keeps_the_threads_that_the_program_gave_it(tiny_model, monkeypatch, by_kernels, computing) -> None:
    """While a step is computed the kernels have threads of their own, where they multiply the weights; the rest of the
    program has its number before, between and after."""
    if by_kernels and not native.available():
        pytest.skip("needs the compiled kernels")
    seen = set()
    forward = Transformer.forward

    def watched(self, *arguments, **named):
        seen.add((torch.get_num_threads(), native.threads()))
        return forward(self, *arguments, **named)

    monkeypatch.setattr(Transformer, "forward", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model = {"model": "smollm2"} if by_kernels else {"model": str(tiny_model), "load_format": "dummy"}
        with LLM(**model, tokenizer="smollm2", max_model_len=64, max_num_seqs=2, threads=3) as made:
            assert torch.get_num_threads() == 2
            made.generate(["One two"], SamplingParams(max_tokens=3), use_tqdm=False)
            assert torch.get_num_threads() == 2
        assert seen == {computing}
    finally:
        torch.set_num_threads(before)


def test_without_a_tokenizer(tiny_model) -> None:
    with LLM(str(tiny_model), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes="16MiB") as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError):
            llm.generate([{"prompt_token_ids": [1]}], SamplingParams(stop=["x"]))


def test_a_profile_is_recorded_between_its_start_and_its_end(tiny_model, tmp_path):
    wanted = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces"), "torch_profiler_with_stack": False}
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    with LLM(str(tiny_model), **settings, profiler_config=wanted) as llm:
        with pytest.raises(EngineError, match="no profile is being recorded"):
            llm.stop_profile()
        llm.start_profile()
        with pytest.raises(EngineError, match="already"):
            llm.start_profile()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        llm.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    with gzip.open(trace) as file:
        assert any(event["name"].startswith("aten::") for event in json.load(file)["traceEvents"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler": "cuda"}, "Invalid enum value 'cuda'"),
        ({"profiler": "torch"}, "no torch_profiler_dir"),
        ({"profiler": "torch", "torch_profiler_dir": "x", "max_iterations": 1}, "max_iterations is not supported"),
        ({"else": 1}, "unknown field `else`"),
        (3, "has the type int"),
    ],
)
def test_profiles_that_are_not_recorded_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM("nowhere", profiler_config=given)


SEVEN_IN_A_ROW = """
import gc, json, sys
import psutil
from holdfast import LLM, SamplingParams
process, after = psutil.Process(), []
for _ in range(7):
    llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes="64MiB")
    llm.generate([{"prompt_token_ids": list(range(100, 400))}] * 4, SamplingParams(max_tokens=4, ignore_eos=True))
    del llm
    gc.collect()
    after.append(process.memory_info().rss)
print(json.dumps(after))
"""


def test_a_dropped_engine_gives_its_memory_back(tiny_model) -> None:
    """Several in a row in one process, as a search for settings starts them. In a process of their own, where nothing
    of other tests is measured with them."""
    done = subprocess.run(
        [sys.executable, "-c", SEVEN_IN_A_ROW, str(tiny_model)], capture_output=True, text=True, check=True, timeout=200
    )
    after: list[int] = json.loads(done.stdout.splitlines()[-1])
    # Each engine held 12 MB of weights and pages; the first ones also pay for what torch sets up once. What is lost
    # stays lost; what an allocator gives back a little later does not.
    assert min(after[-3:]) - min(after[2:4]) < 12 << 20, [size >> 20 for size in after]


def test_urgent_prompts_go_first_and_the_models_advice_is_the_default(tiny_model) -> None:
    order = []
    with LLM(
        str(tiny_model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=1,
        kv_cache_memory_bytes="16MiB",
        scheduling_policy="priority",
        override_generation_config={"temperature": 0.0, "max_new_tokens": 3},
    ) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens) == (0.0, 3)
        assert any("temperature 0.0" in line for line in llm.info.decisions)
        apply = llm._core.scheduler.apply

        def watched(*result):
            outputs = apply(*result)
            order.extend(output.request_id for output in outputs if output.finish_reason is not None)
            return outputs

        llm._core.scheduler.apply = watched
        outputs = llm.generate([[5, 6], [7, 8], [9, 10]], priority=[2, 1, 0])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
        assert order == ["2", "1", "0"]
        explicit = llm.generate([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(explicit[0].outputs[0].token_ids) == 5


def test_refusals_are_value_errors(tiny_model) -> None:
    for settings in (
        {"max_model_len": 4096},
        {"kv_cache_memory_bytes": "100TiB"},
        {"quantization": "awq"},
        {"nonsense": 1},
    ):
        with pytest.raises(ValueError, match=r"\[HF"):
            LLM(str(tiny_model), load_format="dummy", skip_tokenizer_init=True, **settings)


def test_several_threads_wait_for_each_other(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[5 + number, 6, 7] for number in range(6)]
    expected = [llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda ids: llm.generate({"prompt_token_ids": ids}, params)[0], prompts))
    assert [one.outputs[0].token_ids for one in found] == expected


@pytest.mark.parametrize(("prompts", "params", "field"), [(5, None, "prompts"), ("a", {"n": 1}, "sampling_params")])
def test_what_is_no_prompt_or_no_params_is_said(llm, prompts, params, field) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, params)
    assert refused.value.field == field


def test_the_whole_vocabulary_of_a_prompt(llm) -> None:
    """More tokens than a step tells so, and two prompts, of which a step has room for one."""
    prompts = [{"prompt_token_ids": [*range(500, 507)]}, {"prompt_token_ids": [600, 601]}]
    greedy = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    few, whole = llm.generate(prompts, greedy), llm.generate(prompts, greedy.replace(prompt_logprobs=-1))
    assert [len(output.prompt_logprobs) for output in whole] == [7, 2]
    for some, all_of in zip(few, whole, strict=True):
        assert some.outputs[0].token_ids == all_of.outputs[0].token_ids
        for entry, told in zip(some.prompt_logprobs[1:], all_of.prompt_logprobs[1:], strict=True):
            assert len(told) == llm._found.spec.vocab_size
            assert sum(math.exp(one.logprob) for one in told.values()) == pytest.approx(1, abs=1e-3)
            assert all(told[token].logprob == pytest.approx(one.logprob, abs=1e-5) for token, one in entry.items())
    with pytest.raises(UnsupportedOptionError, match="one such prompt"):
        llm.llm_engine.add_request("many", prompts[0], greedy.replace(prompt_logprobs=-1))


def test_requests_are_queued_and_waited_for(llm) -> None:
    """As by vLLM's enqueue: in the order of the prompts, whichever ends first."""
    greedy, short = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (6, 2))
    expected = llm.generate(["One two three", "Four five"], [greedy, short])
    names = llm.enqueue(["One two three", "Four five"], [greedy, short])
    names += llm.enqueue("One two three", short)
    with pytest.raises(RequestError):
        llm.enqueue(["fine", {"prompts": 3}], greedy)
    assert llm.llm_engine.get_num_unfinished_requests() == 3
    found = llm.wait_for_completion()
    assert [output.request_id for output in found] == names
    texts = [output.outputs[0].text for output in expected]
    assert [output.outputs[0].text for output in found[:2]] == texts
    assert llm.wait_for_completion() == []
    for name in ("collective_rpc", "update_weights", "get_weight_version"):
        with pytest.raises(UnsupportedOptionError, match=name):
            getattr(llm, name)()
    assert (llm.get_world_size(), llm.reset_mm_cache()) == (1, None)


def test_an_engine_that_is_stepped_by_hand(llm) -> None:
    """Requests come while others run, each told as it asked, and give what `generate` gives."""
    engine, greedy = llm.llm_engine, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = llm.generate("One two three", greedy)[0].outputs[0]
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    told: dict[str, list] = {kind.name: [] for kind in kinds}
    for kind in kinds:
        engine.add_request(kind.name, "One two three", greedy.replace(output_kind=kind))
        for output in engine.step():
            told[output.request_id].append(output)
    with pytest.raises(RequestError, match="already a request DELTA"):
        engine.add_request("DELTA", "x", greedy)
    with pytest.raises(EngineError, match="unfinished"):
        llm.generate("x", greedy)
    with pytest.raises(EngineError, match="unfinished"):
        llm.sleep()
    engine.add_request("dropped", "x", greedy)
    engine.abort_request("dropped")
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(output)
    assert [len(outputs) for outputs in told.values()] == [6, 6, 1]
    for name in ("CUMULATIVE", "FINAL_ONLY"):
        assert told[name][-1].outputs[0].token_ids == expected.token_ids
        assert told[name][-1].finished
    assert [len(output.outputs[0].token_ids) for output in told["CUMULATIVE"]] == [1, 2, 3, 4, 5, 6]
    assert "".join(output.outputs[0].text for output in told["DELTA"]) == expected.text
    assert engine.step() == []


def test_what_scripts_for_vllm_do_with_an_llm(llm) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 2
    assert llm.get_default_sampling_params().max_tokens != 2
    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], params)
    assert answer.prompt.endswith("<|im_start|>assistant\n")
    assert llm.get_tokenizer().encode(answer.prompt, add_special_tokens=False) == answer.prompt_token_ids
    params.n = 0
    with pytest.raises(RequestError, match="n is 0"):
        llm.generate("x", params)
    (vector,) = llm.embed("Hello", pooling_params=PoolingParams(dimensions=4))
    assert sum(value**2 for value in vector.outputs.embedding) == pytest.approx(1)
    assert len(vector.outputs.embedding) == 4


def test_an_engine_for_asyncio(tiny_model) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    settings = {"load_format": "dummy", "tokenizer": "smollm2", "max_model_len": 64, "kv_cache_memory_bytes": "4MiB"}

    async def all_of(engine: AsyncLLMEngine, name: str) -> list[int]:
        return [token async for one in engine.generate("One two", greedy, name) for token in one.outputs[0].token_ids]

    async def main(engine: AsyncLLMEngine) -> None:
        first, second = await asyncio.gather(all_of(engine, "a"), all_of(engine, "b"))
        assert len(first) == 5
        assert first == second
        async for _ in engine.generate("One", greedy.replace(max_tokens=50), "left"):
            break
        with pytest.raises(RequestError, match="prompt"):
            await all_of_wrong(engine)
        await engine.pause_generation()
        waiting = asyncio.create_task(all_of(engine, "later"))
        assert await engine.is_paused()
        await engine.resume_generation()
        assert await waiting == first
        await engine.check_health()

    async def all_of_wrong(engine: AsyncLLMEngine) -> None:
        async for _ in engine.generate({"prompts": 3}, greedy, "wrong"):
            pass

    engine = AsyncLLMEngine(LLM(model=str(tiny_model), **settings).llm_engine)
    try:
        asyncio.run(main(engine))
    finally:
        engine.shutdown()
    assert not engine.is_running
    with pytest.raises(EngineError, match="has ended"):
        asyncio.run(all_of(engine, "late"))
