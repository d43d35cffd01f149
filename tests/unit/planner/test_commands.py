"""Commands: whatever the plan, every one parses; Holdfast's by its own parsers, others by the flags they have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_parsers import plan_parser, serve_parser
from named_gpus import device_of

from holdfast.checkpoints.sources import builtin
from holdfast.cli.commands import plan, serve
from holdfast.engine_profiles.profile import profile
from holdfast.errors import ConfigurationError
from holdfast.hardware import gpus
from holdfast.models.registry import known_architectures
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.compat.vllm_release import Vllm, parse_vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands, parse_engine, sglang_fraction
from holdfast.planner.engines.vllm_command import vllm_kv_bytes, vllm_terms, vllm_utilization
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device, Machine
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.resolve import resolve_model
from holdfast.planner.models.variants import published_as
from holdfast.planner.report.text import command_lines
from holdfast.units import GIB

Ask = Callable[..., Question]

# As vllm serve --help, python -m sglang.launch_server --help and llama-server --help have them.
VLLM_FLAGS = {
    "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--dtype",
    "--kv-cache-dtype", "--quantization", "--tensor-parallel-size", "--pipeline-parallel-size", "--enable-lora",
    "--max-loras", "--max-lora-rank", "--kv-cache-memory-bytes", "--enable-chunked-prefill", "--load-format",
    "--block-size",
}  # fmt: skip
SGLANG_FLAGS = {
    "--model-path", "--mem-fraction-static", "--context-length", "--max-running-requests", "--chunked-prefill-size",
    "--dtype", "--kv-cache-dtype", "--tp-size", "--pp-size", "--quantization", "--max-total-tokens",
    "--device", "--enable-lora", "--lora-target-modules", "--max-lora-rank", "--max-loras-per-batch",
}  # fmt: skip
LLAMA_FLAGS = {"-m", "-hf", "-hff", "-c", "-np", "-ngl", "-ctk", "-ctv", "-fa", "-sm"}
WITHOUT_VALUE = {"--enable-lora", "--enable-chunked-prefill"}


def flags_of(words: list[str], known: set[str]) -> dict[str, str]:
    """Every word is a known flag or the value of one."""
    found, at = {}, 0
    while at < len(words):
        flag = words[at]
        assert flag in known, words
        if flag in WITHOUT_VALUE:
            found[flag] = ""
            at += 1
            continue
        assert not words[at + 1].startswith("--"), words
        found[flag] = words[at + 1]
        at += 2
    return found


def check(command: Command) -> None:
    if not command.text:
        assert command.notes
        assert not command.available
        return
    words = [word for word in shlex.split(command.text) if not re.fullmatch(r"[A-Z0-9_]+=[\w,-]+", word)]
    assert words, command
    if command.engine == "holdfast":
        assert words[:2] == ["holdfast", "serve"]
        parsed, unknown = serve_parser().parse_known_args(words[2:])
        assert not unknown
        assert parsed.model_positional
        if command.available:
            serve.read_settings(parsed)
        else:
            assert command.notes
    elif command.engine == "vllm":
        rest = words[3:] if words[:2] == ["vllm", "serve"] else words[5:]
        flags = flags_of(rest, VLLM_FLAGS)
        assert 0 < float(flags.get("--gpu-memory-utilization", 0.9)) <= 1
    elif command.engine == "sglang":
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        assert 0 < float(flags_of(words[3:], SGLANG_FLAGS).get("--mem-fraction-static", 0.9)) < 1
    else:
        assert words[0] == "llama-server"
        flags = flags_of(words[1:], LLAMA_FLAGS)
        assert int(flags["-c"]) >= int(flags["-np"])


QUESTIONS = [
    ("llama-3-8b", "rtx4090", {"utilization": 0.85, "max_model_len": 8192, "max_num_seqs": 32}),
    ("llama-3.1-70b", "h100-80", {"count": 4, "dtype": "float16", "max_loras": 4}),
    ("llama-3.1-405b", "h100-80", {"count": 32, "tensor_parallel": 8, "pipeline_parallel": 4}),
    ("qwen3-30b-a3b", "l40s", {"count": 2, "kv_cache_dtype": "fp8", "traffic": (20, 2000, 500)}),
    ("llama-3-70b", "rtx4090", {}),
    ("llama-3.1-8b", "h100-80", {"count": 8, "max_model_len": 8192}),
    ("gemma-3-12b", "rtx3060", {}),
    ("deepseek-v3", "h200", {"count": 8, "block_tokens": 32}),
    ("llama-3.1-8b-awq", "t4", {}),
]


@pytest.mark.parametrize(("model", "gpu", "settings"), QUESTIONS)
@pytest.mark.parametrize(
    "version", [Vllm((0, 4), "v0"), Vllm((0, 6), "v0"), Vllm((0, 11), "v1"), Vllm((0, 26), "v1"), Vllm()]
)
def test_every_command_parses(ask: Ask, model: str, gpu: str, settings: dict[str, object], version: Vllm) -> None:
    found = fit(ask(model, gpu, **settings))
    plans = [found] if found.fits else [way.fit for way in ways_out(found) if way.fit.fits]
    assert plans
    for one in plans:
        for command in commands(one, sequences=one.limits.max_num_seqs, vllm=version).values():
            check(command)


def test_the_flags_of_ways_out_are_those_of_plan(ask: Ask) -> None:
    asked = [ask(model, gpu, **settings) for model, gpu, settings in QUESTIONS]
    asked.append(ask("llama-3.1-8b", "rtx4090", max_model_len=40000))
    asked.append(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=1))
    ways = [way for question in asked for way in ways_out(fit(question))]
    assert len({way.kind for way in ways}) >= 6
    for way in ways:
        parsed, unknown = plan_parser().parse_known_args(shlex.split(way.flags))
        assert not unknown, way.flags
        plan.read_settings(parsed)


def test_commands_on_a_cpu(ask: Ask, cpu: Callable[..., Device]) -> None:
    found = fit(ask("smollm2-135m", device=cpu(8)))
    by_engine = commands(found, sequences=8)
    for command in by_engine.values():
        check(command)
    assert by_engine["holdfast"].available
    assert not by_engine["vllm"].available
    assert "-ngl" not in by_engine["llama.cpp"].text


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("mi300x", "from AMD"), ("m4-max-128", "from Apple"), ("arc-b580", "from Intel"),
        ("v100-32", "v100-32 has 7.0"), ("t4", "t4 has 7.5"), ("gtx1080", "gtx1080 has 6.1"),
    ],
)  # fmt: skip
def test_holdfast_is_not_offered_where_it_has_no_kernels(ask: Ask, gpu: str, why: str) -> None:
    command = commands(fit(ask("llama-3.2-1b", gpu)), sequences=4)["holdfast"]
    assert not command.available
    assert why in " ".join(command.notes)
    assert commands(fit(ask("llama-3.2-1b", "rtx3090")), sequences=4)["holdfast"].available


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_holdfast_is_offered_on_several_gpus(ask: Ask, kind: str) -> None:
    command = commands(fit(ask("llama-3.2-1b", "h100-80", count=2, **{f"{kind}_parallel": 2})), sequences=4)["holdfast"]
    assert command.available
    assert f"--{kind}-parallel-size 2" in command.text


def test_names_with_spaces_and_worse_are_quoted(ask: Ask) -> None:
    question = ask("llama-3-8b", "h100-80")
    question = replace(question, model=replace(question.model, name="./my models/it's; rm -rf $HOME", origin="folder"))
    for engine, command in commands(fit(question), sequences=1).items():
        words = shlex.split(command.text)
        if engine == "llama.cpp":
            assert "./TO-BE-MADE/it's; rm -rf $HOME-BF16.gguf" in words
        else:
            assert "./my models/it's; rm -rf $HOME" in words
        check(command)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_broken_lines_are_still_the_same_command(ask: Ask, width: int) -> None:
    found = fit(ask("llama-3.1-70b", "h100-80", count=4))
    for command in commands(found, sequences=7, vllm=Vllm((0, 26), "v1")).values():
        shown = command_lines(command, width)
        assert all(len(line) <= width for line in shown)
        pasted = "\n".join(line for line in shown if not line.strip().startswith("#"))
        name = {"holdfast": "Holdfast"}.get(command.engine, command.engine)
        shown_text = f"{name}, no command:" if command.lacks else command.text
        assert shlex.split(pasted.replace("\\\n", " ")) == shlex.split(shown_text), "what is refused is not pasted"


def test_short_names_become_ids_that_can_be_fetched(ask: Ask) -> None:
    question = ask("llama-3-8b", "h100-80")
    short = replace(question, model=replace(question.model, name="llama-3-8b"))
    assert "meta-llama/Meta-Llama-3-8B-Instruct" in commands(fit(short), sequences=1)["vllm"].text


def test_the_runner_is_chosen_by_its_variable(ask: Ask) -> None:
    found = fit(ask("llama-3-8b", "h100-80"))
    first = commands(found, sequences=1, vllm=Vllm((0, 26), "v1"))["vllm"]
    second = commands(found, sequences=1, vllm=Vllm((0, 26), "v2"))["vllm"]
    assert first.text.startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ")
    assert second.text.startswith("vllm serve ")
    assert any("does not reserve memory for CUDA graphs" in note for note in second.notes)
    assert not any("does not reserve memory for CUDA graphs" in note for note in first.notes)


def test_vllm_is_told_what_is_free(ask: Ask, gpu: Callable[..., Device]) -> None:
    """It takes a share of the total, and refuses to start when that is not free."""
    crowded = fit(ask("llama-3-8b", device=gpu("h100-80", free_bytes=40 * GIB)))
    share = vllm_utilization(crowded)
    assert share == 0.5
    assert share * crowded.ranks[0].device.total_bytes <= 40 * GIB
    assert vllm_utilization(fit(ask("llama-3-8b", "h100-80", utilization=0.85))) == 0.85


def test_sglangs_fraction_is_weights_and_kv(ask: Ask) -> None:
    found = fit(ask("llama-3-8b", "h100-80"))
    rank = found.ranks[0]
    static = next(term.nbytes for term in rank.terms if term.name == "weights") + rank.room_bytes
    assert sglang_fraction(found) <= static / rank.device.total_bytes < sglang_fraction(found) + 0.01


# Held against what was counted


def loaded(command: Command) -> str:
    words = shlex.split(command.text)
    if command.engine == "llama.cpp":
        return words[words.index("-m" if "-m" in words else "-hf") + 1]
    at = {"holdfast": "serve", "vllm": "serve", "sglang": "--model-path"}[command.engine]
    return words[words.index(at) + 1]


def value(command: Command, *names: str) -> str | None:
    words = shlex.split(command.text)
    return next((words[words.index(name) + 1] for name in names if name in words), None)


METHODS = (None, "fp8", "nf4", "awq", "gptq", "int4", "int8", "Q4_K_M", "Q8_0", "Q4_1")
PLANS = [
    ("llama-3-8b", "h100-80", {}),
    ("llama-3.1-70b", "h100-80", {"count": 4, "tensor_parallel": 4, "max_model_len": 8192}),
    ("llama-3.1-8b-awq", "l4", {"max_model_len": 4096}),
    ("qwen3-30b-a3b", "h200", {"traffic": (8, 1000, 200)}),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model", "gpu", "settings"), PLANS)
def test_a_command_runs_what_was_counted(
    ask: Ask, model: str, gpu: str, settings: dict[str, object], method: str | None
) -> None:
    question = ask(model, gpu, **settings)
    if method is not None and question.model.spec.quantization is not None:
        return
    if method is not None:
        question = replace(question, model=quantized_as(question.model, method))
    found = fit(question)
    for engine, command in commands(found, sequences=4).items():
        check(command)
        published = published_as(question.model)
        if published is not None and engine != "llama.cpp":
            assert loaded(command) == published.name
            continue
        hub_id, made = loaded(command) == question.model.name, "TO-BE-MADE/" in command.text
        assert hub_id != made, command.text
        while_loading = {
            "vllm": {"fp8": "fp8", "nf4": "bitsandbytes"},
            "sglang": {"fp8": "fp8"},
            "holdfast": {"fp8": "fp8", "int4": "int4"},
        }.get(engine, {})
        if engine == "llama.cpp":
            assert made
        else:
            assert made == (method is not None and method not in while_loading)
        if made:
            assert not command.available
            assert command.notes
            kind = method or {"llama-3.1-8b-awq": "Q4_K_M"}.get(model, "BF16")
            near = {"awq": "Q4_K_M", "gptq": "Q4_K_M", "int4": "Q4_K_M", "nf4": "Q4_K_M", "fp8": "Q8_0", "int8": "Q8_0"}
            kind = near.get(kind, kind) if engine == "llama.cpp" else kind
            assert kind.lower() in loaded(command).lower()
            assert any(kind.lower() in note.lower() for note in command.notes), command.notes
        assert value(command, "--quantization") == (while_loading.get(method) if method else None)
        if engine != "llama.cpp":
            ranks = value(command, "--tensor-parallel-size", "--tp-size")
            assert int(ranks or 1) == found.tensor_parallel
            context = value(command, "--max-model-len", "--context-length")
            assert context == str(found.limits.max_model_len)


def test_fp8_is_not_made_on_a_gpu_without_kernels_for_it(ask: Ask) -> None:
    question = ask("qwen2.5-7b", "t4")
    found = fit(replace(question, model=quantized_as(question.model, "fp8")))
    by_engine = commands(found, sequences=1, vllm=parse_vllm("==0.11.0"))
    assert not by_engine["vllm"].available
    assert not by_engine["sglang"].available


def test_vram_alone_tells_no_total(ask: Ask) -> None:
    """A share of what is not known would be all of it."""
    vram = 22 * GIB
    device = Device(index=0, name="gpu", kind="gpu", total_bytes=vram, free_bytes=vram, budget_bytes=vram)
    found = fit(ask("llama-3.1-8b", device=device, max_model_len=4096))
    by_engine = commands(found, sequences=4)
    assert value(by_engine["vllm"], "--gpu-memory-utilization") is None
    pool = int(value(by_engine["vllm"], "--kv-cache-memory-bytes") or 0)
    rotary_bytes = 131_072 * 128 * 2
    assert pool == found.ranks[0].room_bytes - rotary_bytes == vllm_kv_bytes(found, parse_vllm(""))
    assert value(by_engine["sglang"], "--mem-fraction-static") is None
    assert value(by_engine["sglang"], "--max-total-tokens") == str(found.kv_tokens)
    assert value(by_engine["holdfast"], "--vram") == "22528MiB"
    for command in by_engine.values():
        check(command)
    for engine in ("vllm", "sglang"):
        assert any("--vram does not give" in note for note in by_engine[engine].notes)
    first = commands(found, sequences=4, vllm=parse_vllm("==0.10.2"))["vllm"]
    assert value(first, "--kv-cache-memory-bytes") is not None
    older = commands(found, sequences=4, vllm=parse_vllm("==0.10.1"))["vllm"]
    assert value(older, "--kv-cache-memory-bytes") is None
    assert any("--gpu-memory-utilization to 22.00 GiB over" in note for note in older.notes)


def test_a_budget_that_was_set_is_carried(ask: Ask, gpu: Callable[..., Device], cpu: Callable[..., Device]) -> None:
    beside = commands(fit(ask("llama-3.1-8b", device=gpu("rtx4090", budget_bytes=20 * GIB))), sequences=4)
    assert value(beside["holdfast"], "--vram") == "20480MiB"
    assert value(beside["vllm"], "--gpu-memory-utilization") == "0.84"
    ram = commands(fit(ask("smollm2-135m", device=replace(cpu(8), budget_bytes=6 * GIB + 1))), sequences=4)["holdfast"]
    assert value(ram, "--ram") == str(6 * GIB + 1)
    assert value(ram, "--gpu-memory-utilization") is None
    assert ram.available
    check(ram)


def test_the_built_in_model_is_a_file_for_other_engines(
    ask: Ask, cpu: Callable[..., Device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    question = replace(ask("smollm2-135m", device=cpu(8)), model=resolve_model("smollm2").model)
    by_engine = commands(fit(question), sequences=4)
    assert loaded(by_engine["holdfast"]) == "smollm2"
    assert by_engine["holdfast"].available
    path = str(tmp_path / "models" / "smollm2-135m-instruct-q4_1.gguf")
    for engine in ("vllm", "sglang", "llama.cpp"):
        assert loaded(by_engine[engine]) == path
        assert not by_engine[engine].available
        assert any("holdfast pull smollm2" in note for note in by_engine[engine].notes)
    monkeypatch.setattr(builtin, "is_cached", lambda entry: True)
    cached = commands(fit(question), sequences=4)["llama.cpp"]
    assert cached.available
    assert not any("pull" in note for note in cached.notes)


def test_a_gguf_at_the_hub_is_named_as_each_engine_takes_it(ask: Ask) -> None:
    model = quantized_as(ask("llama-3-8b", "rtx4090").model, "Q4_K_M")
    stored = {name: replace(one, path=Path("it-Q4_K_M.gguf")) for name, one in (model.stored or {}).items()}
    there = replace(model, name="some/it-GGUF", origin="hub", stored=stored, derived=False, made_as=None)
    by_engine = commands(fit(replace(ask("llama-3-8b", "rtx4090"), model=there)), sequences=4)
    assert by_engine["llama.cpp"].text.startswith("llama-server -hf some/it-GGUF -hff it-Q4_K_M.gguf ")
    assert loaded(by_engine["vllm"]) == "some/it-GGUF:Q4_K_M"
    assert not by_engine["sglang"].available
    assert by_engine["holdfast"].available, "it computes with K types"
    here = commands(fit(replace(ask("llama-3-8b", "rtx4090"), model=replace(there, origin="file"))), sequences=4)
    assert loaded(here["llama.cpp"]) == loaded(here["sglang"]) == "it-Q4_K_M.gguf"
    assert here["llama.cpp"].available


def test_llama_cpp_shares_its_context_among_slots(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=8192))
    words = shlex.split(commands(found, sequences=256)["llama.cpp"].text)
    slots, context = int(words[words.index("-np") + 1]), int(words[words.index("-c") + 1])
    assert context == slots * 8192
    assert context <= fit(replace(found.question, engine="llama.cpp")).kv_tokens


def test_fp8_kv_is_spelled_as_each_engine_does(ask: Ask) -> None:
    by_engine = commands(fit(ask("llama-3-8b", "h100-80", kv_cache_dtype="fp8")), sequences=4)
    assert "--kv-cache-dtype fp8" in by_engine["vllm"].text
    assert "--kv-cache-dtype fp8_e4m3" in by_engine["sglang"].text
    assert "-ctk q8_0 -ctv q8_0 -fa on" in by_engine["llama.cpp"].text


@pytest.mark.parametrize(
    ("text", "engine"), [("vllm", "vllm"), ("vLLM==0.26", "vllm"), ("llamacpp", "llama.cpp"), ("holdfast", "holdfast")]
)
def test_engines_by_name(text: str, engine: str) -> None:
    assert parse_engine(text)[0] == engine


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_engine("tgi")
    assert refused.value.code == "HF146"
    assert "sglang" in (refused.value.needed or "")


# Only what a version and a GPU have


@pytest.mark.parametrize("version", ["==0.5.4", "==0.6.6", "==0.7.3"])
def test_the_v0_engine_is_told_to_chunk(ask: Ask, version: str) -> None:
    """It refuses steps that are shorter than the context unless it chunks prompts."""
    found = fit(ask("qwen3-8b", "l4"))
    assert found.limits.max_model_len > found.limits.max_num_batched_tokens
    command = commands(found, sequences=4, vllm=parse_vllm(version))["vllm"]
    assert "--enable-chunked-prefill" in shlex.split(command.text)
    assert any("(V0 engine)" in note for note in command.notes)
    check(command)
    newer = commands(found, sequences=4, vllm=parse_vllm("==0.8.5"))["vllm"]
    assert "--enable-chunked-prefill" not in newer.text
    assert any("(V1 engine)" in note for note in newer.notes)


@pytest.mark.parametrize(
    ("model", "version", "settings"),
    [
        ("mistral-7b-v0.2", "==0.4", {}),
        ("llama-3.1-8b", "==0.6", {"max_loras": 2}),
    ],
)
def test_where_it_cannot_chunk_a_step_holds_the_whole_context(
    ask: Ask, model: str, version: str, settings: dict[str, object]
) -> None:
    """0.4.0 has no flag for it, and adapters did not go with it: the larger steps are planned too."""
    found = fit(ask(model, "l4", **settings))
    command = commands(found, sequences=4, vllm=parse_vllm(version))["vllm"]
    assert "--enable-chunked-prefill" not in command.text
    length = int(value(command, "--max-model-len") or 0)
    assert 0 < length <= int(value(command, "--max-num-batched-tokens") or 0)
    assert length < found.limits.max_model_len, "larger steps leave less room"
    assert command.available


def test_a_length_that_was_left_to_us_is_one_that_the_version_holds(ask: Ask, gpu: Callable[..., Device]) -> None:
    """Its share is a whole hundredth, so it may have less than we do."""
    total = gpus.find("h100-80").usable_bytes
    device = gpu("h100-80", total_bytes=total, free_bytes=int(0.8899 * total))
    found = fit(ask("qwen3-32b", device=device, max_num_seqs=256, max_num_batched_tokens=8192))
    vllm = parse_vllm("==0.29")
    command = commands(found, sequences=4, vllm=vllm)["vllm"]
    held = found.ranks[0].kv.longest(vllm_kv_bytes(found, vllm), found.limits.max_model_len)
    assert int(value(command, "--max-model-len") or 0) == held < found.limits.max_model_len
    assert command.available
    asked = fit(
        ask(
            "qwen3-32b",
            device=device,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=found.limits.max_model_len,
        )
    )
    kept = commands(asked, sequences=4, vllm=vllm)["vllm"]
    assert value(kept, "--max-model-len") == str(found.limits.max_model_len)
    assert any("it would refuse" in note for note in kept.notes)
    assert not kept.available


@pytest.mark.parametrize(("text", "code"), [("==0.7:v1", "HF147"), ("==0.11:v0", "HF147"), ("==0.20:v2", "HF147")])
def test_an_engine_that_the_version_does_not_have(text: str, code: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_vllm(text)
    assert refused.value.code == code
    assert "since 0.8" in (refused.value.needed or "")


def test_older_versions_are_started_as_they_can_be(ask: Ask) -> None:
    found = fit(ask("llama-3-8b", "h100-80"))
    module = "python -m vllm.entrypoints.openai.api_server --model "
    assert commands(found, sequences=1, vllm=parse_vllm("==0.5.0"))["vllm"].text.startswith(module)
    assert commands(found, sequences=1, vllm=parse_vllm("==0.8:v0"))["vllm"].text.startswith("VLLM_USE_V1=0 vllm serve")
    question = ask("llama-3-8b", "l4", max_model_len=4096)
    made = fit(replace(question, model=quantized_as(question.model, "nf4")))
    assert value(commands(made, sequences=1, vllm=parse_vllm("==0.6"))["vllm"], "--load-format") == "bitsandbytes"
    assert value(commands(made, sequences=1, vllm=parse_vllm("==0.29"))["vllm"], "--load-format") is None


def test_a_gpu_without_bfloat16_is_told_so(ask: Ask) -> None:
    by_engine = commands(fit(ask("llama-3.1-8b", "t4", count=2)), sequences=4)
    assert value(by_engine["vllm"], "--dtype") == "half"
    assert value(by_engine["sglang"], "--dtype") == "half"
    assert value(commands(fit(ask("llama-3.1-8b", "l4")), sequences=4)["vllm"], "--dtype") is None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b"])
def test_no_way_out_needs_kernels_that_the_gpu_lacks(ask: Ask, model: str) -> None:
    ways = ways_out(fit(ask(model, "t4")))
    assert ways
    for way in ways:
        quantization = way.fit.question.model.spec.quantization
        if way.fit.ranks[0].device.gpu and way.fit.ranks[0].device.gpu.key == "t4" and quantization is not None:
            assert quantization.method not in ("fp8", "int4"), way.change


def test_a_quantized_model_on_a_gpu_without_kernels_for_it(ask: Ask) -> None:
    on_turing = fit(ask("llama-3.1-8b-fp8", "t4", count=2, max_model_len=2048))
    sglang = commands(on_turing, sequences=1)["sglang"]
    assert not sglang.available
    assert any("FP8 needs compute capability 8.0; t4 has 7.5" in note for note in sglang.notes)
    on_volta = commands(fit(ask("llama-3.1-8b-fp8", "v100-32", max_model_len=2048)), sequences=1)["vllm"]
    assert any("FP8 needs compute capability 7.5; v100-32 has 7.0" in note for note in on_volta.notes)


def test_fp8_on_turing_is_in_newer_releases_of_vllm(ask: Ask) -> None:
    on_turing = fit(ask("qwen3-8b-fp8", "t4", count=2, max_model_len=2048))
    assert not any("FP8 needs" in one for one in commands(on_turing, sequences=1)["vllm"].lacks)
    for release, lacking in (("0.11.0", True), ("0.13.0", True), ("0.14.0", False)):
        older = commands(on_turing, sequences=1, vllm=parse_vllm(f"=={release}"))["vllm"]
        assert any("t4 has 7.5, enough since 0.14.0" in one for one in older.lacks) == lacking, release


def test_on_a_cpu_a_share_would_be_of_the_whole_machine(ask: Ask, cpu: Callable[..., Device]) -> None:
    device = replace(cpu(6), budget_bytes=6 * GIB)
    by_engine = commands(fit(ask("smollm2-135m", device=device)), sequences=4)
    assert "--gpu-memory-utilization" not in by_engine["vllm"].text
    space = re.match(r"VLLM_CPU_KVCACHE_SPACE=(\d+) vllm serve ", by_engine["vllm"].text)
    assert space is not None
    assert 1 <= int(space[1]) < 6
    assert "--mem-fraction-static" not in by_engine["sglang"].text
    assert value(by_engine["sglang"], "--device") == "cpu"


def test_apples_gpus_run_neither_vllm_nor_sglang(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "m3-max-64"))
    by_engine = commands(found, sequences=4)
    for engine in ("vllm", "sglang"):
        assert not by_engine[engine].available
        assert any("Apple" in note for note in by_engine[engine].notes)
    assert not any("Apple" in note for note in by_engine["llama.cpp"].notes)
    for way in ways_out(fit(ask("llama-3.1-70b", "m3-max-64"))):
        assert way.fit.question.model.spec.quantization is None, way.change


@pytest.mark.parametrize(("gpu", "reason"), [
    ("gtx1080", "7.5; gtx1080 has 6.1"), ("p40", "7.5; p40 has 6.1"), ("jetson-xavier-32", "7.5; jetson-xavier-32 has"),
    ("v100-32", "7.5; v100-32 has 7.0"), ("arc-b580", "Intel"),
])  # fmt: skip
def test_gpus_that_vllm_has_no_build_for(ask: Ask, gpu: str, reason: str) -> None:
    by_engine = commands(fit(ask("qwen2.5-0.5b", gpu)), sequences=4)
    for engine in ("vllm", "sglang"):
        assert not by_engine[engine].available
        assert any(reason in note for note in by_engine[engine].notes), by_engine[engine].notes


def test_volta_was_left_when_cuda_left_it(ask: Ask) -> None:
    found = fit(ask("qwen2.5-0.5b", "v100-32"))
    assert commands(found, sequences=4, vllm=parse_vllm("==0.19"))["vllm"].available
    assert not commands(found, sequences=4, vllm=parse_vllm("==0.20"))["vllm"].available


@pytest.mark.parametrize(("model", "gpu", "lacking", "since", "has"), [
    ("qwen3-8b", "h100-80", "==0.7.3", "0.8.4", "==0.8.5"),
    ("qwen3-8b", "h100-80", "==0.8.2", "0.8.4", "==0.8.4"),
    ("gpt-oss-20b", "h100-80", "==0.6", "0.10.1", "==0.10.2"),
    ("gemma-3-4b", "h100-80", "==0.7", "0.8.0", "==0.8"),
    ("llama-4-scout", "b300", "==0.8.1", "0.8.3", "==0.9"),
    ("glm-4.5-air", "b300", "==0.9", "0.10.0", "==0.10"),
    ("deepseek-v2-lite", "h100-80", "==0.4", "0.5.1", "==0.6"),
    ("gemma-2-9b", "h100-80", "==0.5.0", "0.5.1", "==0.5.3"),
])  # fmt: skip
def test_a_version_that_is_older_than_the_model(
    ask: Ask, model: str, gpu: str, lacking: str, since: str, has: str
) -> None:
    found = fit(ask(model, gpu, max_model_len=4096, max_num_seqs=4))
    older = commands(found, sequences=4, vllm=parse_vllm(lacking))["vllm"]
    assert not older.available
    assert any(f"is in vLLM since {since}, and not in" in note for note in older.notes), older.notes
    assert commands(found, sequences=4, vllm=parse_vllm(has))["vllm"].available


def test_where_only_some_releases_of_a_version_have_the_model(ask: Ask) -> None:
    found = fit(ask("qwen3-8b", "h100-80"))
    command = commands(found, sequences=4, vllm=parse_vllm("==0.8"))["vllm"]
    assert command.available
    assert "Qwen3ForCausalLM is in vLLM since 0.8.4" in command.notes
    assert any("in SGLang since 0.4.5" in note for note in commands(found, sequences=4)["sglang"].notes)


def test_every_architecture_with_a_first_release_is_one_that_is_known() -> None:
    tables = [profile(engine).data["architectures"].values() for engine in ("vllm", "sglang")]
    assert {name for table in tables for names in table for name in names.split()} <= set(known_architectures())


@pytest.mark.parametrize(
    ("rank", "version", "taken"),
    [
        (17, "", 32),
        (16, "", 16),
        (1, "", 8),
        (300, "", 320),
        (300, "==0.6", None),
        (600, "", None),
    ],
)
def test_adapters_have_slots_of_a_rank_that_vllm_takes(ask: Ask, rank: int, version: str, taken: int | None) -> None:
    found = fit(ask("llama-3.1-8b", "h100-80", max_model_len=4096, max_loras=2, max_lora_rank=rank))
    vllm = parse_vllm(version)
    command = commands(found, sequences=4, vllm=vllm)["vllm"]
    assert command.available == (taken is not None)
    if taken is None:
        assert f"it does not support adapters of rank {rank}" in command.notes
        return
    assert value(command, "--max-lora-rank") == str(taken)
    exact = fit(ask("llama-3.1-8b", "h100-80", max_model_len=4096, max_loras=2, max_lora_rank=taken))
    assert vllm_terms(found, vllm).weights == pytest.approx(vllm_terms(exact, vllm).weights, abs=taken)


def test_kv_that_engines_do_not_keep(ask: Ask) -> None:
    on_ampere = commands(fit(ask("llama-3.1-8b", "a100-80", kv_cache_dtype="float32")), sequences=4)
    on_turing = commands(fit(ask("qwen2.5-0.5b", "t4", kv_cache_dtype="fp8")), sequences=4)
    for engine in ("holdfast", "vllm", "sglang"):
        assert not on_ampere[engine].available
        assert any("not in float32" in note for note in on_ampere[engine].notes)
    for engine in ("vllm", "sglang"):
        assert not on_turing[engine].available
        assert any("an FP8 KV cache needs compute capability 8.0" in note for note in on_turing[engine].notes)


def test_attention_by_an_index_needs_newer_gpus(ask: Ask) -> None:
    older = commands(fit(ask("deepseek-v3.2", "a100-80", count=16, pipeline_parallel=2)), sequences=4)["vllm"]
    assert not older.available
    assert any("sparse attention with an indexer needs compute capability 9.0" in note for note in older.notes)
    assert commands(fit(ask("deepseek-v3.2", "h200", count=8)), sequences=4)["vllm"].available


def test_blocks_that_were_asked_for_are_asked_of_vllm(ask: Ask) -> None:
    command = commands(fit(ask("llama-3.1-8b", "a100-80", block_tokens=32)), sequences=4)["vllm"]
    assert value(command, "--block-size") == "32"
    assert command.available
    odd = commands(fit(ask("llama-3.1-8b", "a100-80", block_tokens=24)), sequences=4)["vllm"]
    assert not odd.available


@pytest.mark.parametrize(("gpu", "terms", "without"), [
    ("m3-max-64", {"driver"}, {"context", "graphs", "hip_graphs"}),
    ("mi300x", {"driver", "hip_graphs"}, {"context", "graphs"}),
    ("arc-b580", {"driver"}, {"context", "graphs", "hip_graphs"}),
    ("rtx2080ti", {"context", "graphs"}, {"driver", "hip_graphs"}),
])  # fmt: skip
def test_cuda_is_charged_to_nvidias_gpus_only(ask: Ask, gpu: str, terms: set[str], without: set[str]) -> None:
    names = {term.name for term in fit(ask("qwen2.5-0.5b", gpu)).ranks[0].terms}
    assert terms <= names
    assert not without & names


def test_experts_are_padded_as_the_gpus_kernel_wants_them(ask: Ask) -> None:
    """2,880 x 2,880: Marlin makes it 3,072 x 2,944, two ranks 2 x 1,536; the newest Blackwell kernel 3,072 x 3,072."""
    padding = {}
    for gpu, count in (("a100-80", 1), ("a100-80", 2), ("h100-80", 1), ("b200", 1)):
        found = fit(ask("gpt-oss-20b", gpu, count=count, tensor_parallel=count))
        terms = {term.name: term.nbytes for term in found.ranks[0].terms}
        padding[gpu, count] = count * terms["padding"] / (24 * 32 * 3 * 2880 * 2880 * 17 / 32)
    assert padding["a100-80", 1] == pytest.approx(3072 * 2944 / 2880**2 - 1, abs=0.002)
    assert padding["a100-80", 2] == pytest.approx(3072 * 3072 / 2880**2 - 1, abs=0.002)
    assert padding["h100-80", 1] == pytest.approx(3072 / 2880 - 1, abs=0.002)
    assert padding["b200", 1] == pytest.approx(3072 * 3072 / 2880**2 - 1, abs=0.002)


def test_llama_cpp_has_a_slot_for_every_request_of_the_traffic(ask: Ask) -> None:
    found = fit(ask("qwen3-8b", "l4", traffic=(6, 1500, 500)))
    command = commands(found, sequences=found.limits.max_num_seqs)["llama.cpp"]
    assert value(command, "-np") == "6"
    each = int(value(command, "-c") or 0) // 6
    assert each >= 2000
    assert each * 6 <= fit(replace(found.question, engine="llama.cpp")).kv_tokens


@pytest.mark.parametrize("quantization", ["awq", "Q4_K_M"])
def test_llama_cpp_is_given_what_its_own_terms_hold(ask: Ask, quantization: str) -> None:
    """Of an AWQ plan it is named a GGUF Q4_K_M: as much context as the plan of that has."""
    question = ask("llama-3.1-70b", "rtx4090", count=2)
    planned = fit(replace(question, model=quantized_as(question.model, quantization)))
    own = fit(replace(question, model=quantized_as(question.model, "Q4_K_M"), engine="llama.cpp"))
    command = commands(planned, sequences=1)["llama.cpp"]
    assert "Q4_K_M.gguf" in command.text
    assert value(command, "-c") == str(own.limits.max_model_len)


def test_no_command_where_llama_cpp_holds_none(ask: Ask) -> None:
    """INT4 fits where a Q4_K_M, which is larger, does not."""
    question = ask("llama-3.1-70b", "rtx4090", count=2, utilization=0.87)
    planned = fit(replace(question, model=quantized_as(question.model, "int4")))
    assert planned.fits
    command = commands(planned, sequences=1)["llama.cpp"]
    assert (command.text, command.available) == ("", False)
    assert any("as llama.cpp allocates memory, it is" in note for note in command.notes)


def test_commands_serve_what_was_asked_for_and_not_what_lent_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cannot be asked: the catalogue takes the base model for the instructed one, which has the same shapes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolved = resolve_model("meta-llama/Llama-3.1-8B")
    assert resolved.model.name == "meta-llama/Llama-3.1-8B"
    assert "shapes of meta-llama/Llama-3.1-8B-Instruct, which the catalogue treats" in resolved.decisions[0].reason
    found = fit(replace(_on_4090(), model=resolved.model))
    for engine in ("holdfast", "vllm", "sglang"):
        assert "meta-llama/Llama-3.1-8B " in commands(found, sequences=4)[engine].text + " "
    short = fit(replace(_on_4090(), model=resolve_model("llama-3.1-8b").model))
    assert "meta-llama/Llama-3.1-8B-Instruct " in commands(short, sequences=4)["vllm"].text


def _on_4090() -> Question:
    model = resolve_model("smollm2-135m").model
    return Question(model=model, machine=Machine(devices=(device_of("rtx4090"),)))
