"""LoRA adapters through `LLM`: equal to merged weights, alone and mixed; what is refused, and what it costs."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from lora_adapters import merge, write_adapter

from holdfast import LLM, AsyncLLMEngine, LoRARequest, SamplingParams
from holdfast.checkpoints.lora.adapter import read_adapter
from holdfast.engine import async_llm_engine
from holdfast.engine.requests import adapters
from holdfast.errors import AdapterError, ConfigurationError, UnsupportedOptionError
from holdfast.execution.lora import files
from holdfast.records import EngineOutput, Request

pytestmark = pytest.mark.usefixtures("forked_starts")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(37 * number + 11 * place * place) % 290 + 3 for place in range(21)] for number in range(4)]


def make_llm(folder: Path, **settings: object) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes="4MiB",
        device="cpu",
        dtype="float32",
        **settings,
    )


def tokens(llm: LLM, prompts: list[list[int]], lora: object = None) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": one} for one in prompts], GREEDY, use_tqdm=False, lora_request=lora)
    return [one.outputs[0].token_ids for one in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, adapters of several ranks, forms and targets, and the model merged with each."""
    base = tmp_path_factory.mktemp("lora")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).float().save_pretrained(base / "model")
    write_adapter(base / "all", base / "model", seed=1)
    write_adapter(base / "attention", base / "model", seed=2, rank=3, modules=("self_attn.q_proj", "self_attn.v_proj"))
    write_adapter(
        base / "patterns",
        base / "model",
        seed=3,
        rank=8,
        ranks={"k_proj": 16, "down_proj": 1},
        use_rslora=True,
        alpha_pattern={"mlp.down_proj": 3},
        target_modules="all-linear",
    )
    for name in ("all", "attention", "patterns"):
        merge(base / f"merged-{name}", base / "model", base / name)
    return base


@pytest.fixture(scope="module")
def merged(folder: Path) -> dict[str, list[list[int]]]:
    """What models with merged weights answer, and the model itself."""
    answers = {}
    for name in ("model", "merged-all", "merged-attention", "merged-patterns"):
        with make_llm(folder / name) as llm:
            answers[name.removeprefix("merged-")] = tokens(llm, PROMPTS)
    assert len({str(found) for found in answers.values()}) == 4
    return answers


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder / "model", enable_lora=True, max_loras=2, max_lora_rank=16, max_cpu_loras=3) as made:
        yield made


def request(folder: Path, name: str) -> LoRARequest:
    return LoRARequest(name, ["all", "attention", "patterns"].index(name) + 1, str(folder / name))


def test_each_alone_answers_as_the_merged_model(llm: LLM, folder: Path, merged: dict[str, list[list[int]]]) -> None:
    """Three through two places: one of them comes back from RAM. The same prompts never share a prefix."""
    for name in ("all", "attention", "patterns", "all"):
        assert tokens(llm, PROMPTS, request(folder, name)) == merged[name]
    assert tokens(llm, PROMPTS) == merged["model"]


def test_mixed_in_one_batch(llm: LLM, folder: Path, merged: dict[str, list[list[int]]]) -> None:
    """Also more adapters than places: those wait."""
    for names in (("all", None, "attention", "all"), ("patterns", "all", "attention", None)):
        asked = [None if name is None else request(folder, name) for name in names]
        wanted = [merged[name or "model"][place] for place, name in enumerate(names)]
        assert tokens(llm, PROMPTS, asked) == wanted


def test_rows_without_an_adapter_are_the_same_bits(llm: LLM, folder: Path) -> None:
    params = GREEDY.replace(logprobs=5, prompt_logprobs=3)
    prompts = [{"prompt_token_ids": [*prompt, 7]} for prompt in PROMPTS]

    def told(lora: object) -> object:
        llm.reset_prefix_cache()
        found = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)[0]
        return found.outputs[0].logprobs, found.prompt_logprobs

    alone = told(None)
    assert told([None, request(folder, "all"), request(folder, "all"), request(folder, "attention")]) == alone


def test_it_is_counted_in_the_plan(llm: LLM, folder: Path) -> None:
    with make_llm(folder / "model") as plain:
        assert plain.info.memory is not None
        assert "adapters" not in {term.term for term in plain.info.memory.terms}
    assert llm.info.memory is not None
    (term,) = [term for term in llm.info.memory.terms if term.term == "adapters"]
    # q, k, v, o, gate, up, down of three layers, float32, padded to rank 16; two places, one copy and one to exchange.
    numbers = 3 * 16 * ((64 + 64) + 2 * (32 + 64) + (64 + 64) + 2 * (96 + 64) + (64 + 96))
    assert term.planned_bytes == term.measured_bytes == 4 * numbers * 4


def test_ranks_in_processes_of_their_own(llm: LLM, folder: Path, merged: dict[str, list[list[int]]]) -> None:
    """More adapters than places, so that all ranks change theirs."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 3}
    with make_llm(folder / "model", tensor_parallel_size=2, threads=2, **lora) as several:
        for names in (("all", None, "attention", "all"), ("patterns", "all", "attention", None)):
            asked = [None if name is None else request(folder, name) for name in names]
            wanted = [merged[name or "model"][place] for place, name in enumerate(names)]
            assert tokens(several, PROMPTS, asked) == wanted
        assert several.info.memory is not None
        (term,) = [term for term in several.info.memory.terms if term.term == "adapters"]
        assert term.planned_bytes == term.measured_bytes
        (of_one,) = [term for term in llm.info.memory.terms if term.term == "adapters"]
        # B of q, k, v, gate and up and A of o and down are divided; the other factors are whole on each.
        whole = 4 * 3 * 16 * (3 * 64 + 64 + 2 * 64 + 64) * 4
        assert term.planned_bytes == of_one.planned_bytes + whole


def test_a_number_stands_for_one_adapter(llm: LLM, folder: Path, tmp_path: Path) -> None:
    found = {name: tokens(llm, PROMPTS[:1], request(folder, name)) for name in ("all", "attention")}
    # Its number counts: vLLM's scripts give one adapter several names.
    assert tokens(llm, PROMPTS[:1], LoRARequest("other", 1, str(folder / "all"))) == found["all"]
    for name, number, path in (("all", 2, "all"), ("all", 1, "attention")):
        with pytest.raises(AdapterError, match="of different LoRA adapters"):
            tokens(llm, PROMPTS[:1], LoRARequest(name, number, str(folder / path)))
    shutil.copytree(folder / "all", tmp_path / "mine")
    mine = LoRARequest("mine", 77, str(tmp_path / "mine"))
    before = tokens(llm, PROMPTS[:1], mine)
    (tmp_path / "mine" / "adapter_config.json").write_text(
        (folder / "all" / "adapter_config.json").read_text().replace('"lora_alpha": 8', '"lora_alpha": 80')
    )
    with pytest.raises(AdapterError, match="have changed since they were loaded"):
        tokens(llm, PROMPTS[:1], mine)
    again = LoRARequest("mine", 77, str(tmp_path / "mine"), load_inplace=True)
    assert tokens(llm, PROMPTS[:1], again) != before  # Nothing cached of the old one is used.
    assert before == tokens(llm, PROMPTS[:1], request(folder, "all"))


def test_one_that_is_gone_ends_its_own_requests_alone(folder: Path, tmp_path: Path, merged: dict[str, object]) -> None:
    """Found when its place is filled: the engine goes on."""
    shutil.copytree(folder / "all", tmp_path / "gone")
    with make_llm(folder / "model", enable_lora=True) as llm:
        ref = llm._adapters.resolve(LoRARequest("gone", 1, str(tmp_path / "gone")))
        (tmp_path / "gone" / "adapter_model.safetensors").unlink()
        llm._adapters.resolve = lambda asked: ref  # type: ignore[method-assign,assignment]
        with pytest.raises(AdapterError, match="adapter_model"):
            tokens(llm, PROMPTS, [None, LoRARequest("gone", 1, "/x"), None, None])
        assert tokens(llm, PROMPTS) == merged["model"]


def test_others_go_on_while_one_is_read(
    llm: LLM, folder: Path, merged: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files come when everybody else has ended: also who has another adapter, and who came later."""
    let_go, core = threading.Event(), llm._core
    assert core is not None
    slow, ready = (llm._adapters.resolve(request(folder, name)) for name in ("patterns", "all"))
    assert tokens(llm, PROMPTS[:1], request(folder, "all")) == merged["all"][:1]
    assert tokens(llm, PROMPTS[:1], LoRARequest("other", 55, str(folder / "attention"))) == merged["attention"][:1]
    monkeypatch.setattr(
        files,
        "read_adapter",
        lambda *asked, **settings: let_go.wait(120) and read_adapter(*asked, **settings),
    )
    slow = msgspec.structs.replace(slow, number=56)  # Read anew, whatever others left behind.
    answers: dict[str, list[int]] = {}
    for number, adapter in enumerate((slow, None, ready, None)):
        answers[str(number)] = []
        core.add(Request(request_id=str(number), prompt_token_ids=PROMPTS[number], params=GREEDY, adapter=adapter))
    ended = set[str]()
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
            ended |= {output.request_id} if output.finish_reason is not None else set()
        if len(ended) == 3 and not let_go.is_set():
            assert not answers["0"]
            let_go.set()
    expected = [merged[name][number] for number, name in enumerate(("patterns", "model", "all", "model"))]
    assert list(answers.values()) == expected


def test_streams_of_a_thread_go_on_while_an_adapter_is_looked_at(
    folder: Path, merged: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files do not come: who asks for it is told after a while, and all who ask wait for one look."""
    come, looks = threading.Event(), list[str]()

    def slow(found: Path, *given: object, **named: object) -> object:
        looks.append(found.name)
        assert come.wait(120)
        return read_adapter(found, *given, **named)  # type: ignore[arg-type]

    async def said(engine: AsyncLLMEngine, name: str, lora: LoRARequest | None = None) -> list[int]:
        prompt, found = {"prompt_token_ids": PROMPTS[0]}, list[int]()
        async for output in engine.generate(prompt, GREEDY, name, lora_request=lora):
            found = output.outputs[0].token_ids
        return found

    async def main(engine: AsyncLLMEngine) -> None:
        monkeypatch.setattr(async_llm_engine, "EXAMINE_LIMIT_S", 0.3)
        with pytest.raises(AdapterError, match=r"could not be read within 0\.3 s"):
            await asyncio.wait_for(said(engine, "late", request(folder, "all")), 120)
        monkeypatch.setattr(async_llm_engine, "EXAMINE_LIMIT_S", 120)
        waiting = [asyncio.create_task(said(engine, str(place), request(folder, "all"))) for place in range(2)]
        assert await asyncio.wait_for(said(engine, "plain"), 120) == merged["model"][0]
        come.set()
        assert await asyncio.gather(*waiting) == [merged["all"][0]] * 2
        assert await said(engine, "again", request(folder, "all")) == merged["all"][0]
        assert looks == ["all"]

    monkeypatch.setattr(adapters, "read_adapter", slow)
    engine = AsyncLLMEngine(make_llm(folder / "model", enable_lora=True).llm_engine)
    try:
        asyncio.run(main(engine))
    finally:
        come.set()
        engine.shutdown()


def test_one_with_numbers_that_are_none_ends_its_own_requests_alone(
    llm: LLM, folder: Path, tmp_path: Path, merged: dict[str, list[list[int]]]
) -> None:
    write_adapter(tmp_path / "endless", folder / "model", seed=4, size=float("inf"))
    with pytest.raises(AdapterError, match="non-finite values in float32") as caught:
        tokens(llm, PROMPTS, [LoRARequest("endless", 9, str(tmp_path / "endless")), None, None, None])
    assert caught.value.code == "HF377"
    assert tokens(llm, PROMPTS) == merged["model"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_too_large_to_compute_with_ends_its_own_requests_alone(
    llm: LLM, folder: Path, tmp_path: Path, merged: dict[str, list[list[int]]], temperature: float
) -> None:
    """All of its factors are finite; what comes of them is not."""
    write_adapter(tmp_path / "huge", folder / "model", seed=4, size=1e30)
    core = llm._core
    assert core is not None
    huge = llm._adapters.resolve(LoRARequest("huge", 80 + int(temperature), str(tmp_path / "huge")))
    ready = llm._adapters.resolve(request(folder, "all"))
    params = GREEDY.replace(temperature=temperature, logprobs=2, prompt_logprobs=1)
    found = dict[str, list[EngineOutput]]()
    for number, (adapter, asked) in enumerate(((huge, params), (None, GREEDY), (ready, GREEDY), (huge, params))):
        found[str(number)] = []
        core.add(Request(request_id=str(number), prompt_token_ids=PROMPTS[number], params=asked, adapter=adapter))
    while core.has_work:
        for output in core.step():
            found[output.request_id].append(output)
        core.scheduler.check_invariants()
    for number in ("0", "3"):
        assert [token for output in found[number] for token in output.token_ids] == []
        failure = found[number][-1].failure
        assert failure is not None
        assert (failure.kind, failure.code) == ("NotFiniteError", "HF442")
    for number, name in (("1", "model"), ("2", "all")):
        answer = [token for output in found[number] for token in output.token_ids]
        assert answer == merged[name][int(number)]


def test_what_is_not_enabled_or_does_not_go_together_is_refused(llm: LLM, folder: Path) -> None:
    with make_llm(folder / "model") as plain, pytest.raises(UnsupportedOptionError, match="not enabled"):
        tokens(plain, PROMPTS[:1], request(folder, "all"))
    with pytest.raises(ConfigurationError, match="not enabled"):
        make_llm(folder / "model", max_loras=2)
    with pytest.raises(ConfigurationError, match="max_cpu_loras"):
        make_llm(folder / "model", enable_lora=True, max_loras=2, max_cpu_loras=1)
    with pytest.raises(ConfigurationError, match="float32"):
        make_llm(folder / "model", enable_lora=True, lora_dtype="bfloat16")
    small = make_llm(folder / "model", enable_lora=True, max_lora_rank=8)
    with small, pytest.raises(AdapterError, match="rank 16"):
        tokens(small, PROMPTS[:1], request(folder, "patterns"))
