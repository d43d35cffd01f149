"""Commands: whatever the plan, every one parses; Holdfast's by its own parsers, others by the flags they have."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.cli import plan, serve
from holdfast.errors import ConfigurationError
from holdfast.planner.commands import Command, commands, parse_engine, sglang_fraction, vllm_utilization
from holdfast.planner.fit import Question, fit
from holdfast.planner.question import Device
from holdfast.planner.report import command_lines
from holdfast.planner.requantize import quantized_as
from holdfast.planner.vllm_sizing import Vllm
from holdfast.planner.ways_out import ways_out
from holdfast.units import GIB

Ask = Callable[..., Question]

# As vllm serve --help, python -m sglang.launch_server --help and llama-server --help have them.
VLLM_FLAGS = {
    "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--dtype",
    "--kv-cache-dtype", "--quantization", "--tensor-parallel-size", "--pipeline-parallel-size", "--enable-lora",
    "--max-loras", "--max-lora-rank",
}  # fmt: skip
SGLANG_FLAGS = {
    "--model-path", "--mem-fraction-static", "--context-length", "--max-running-requests", "--chunked-prefill-size",
    "--dtype", "--kv-cache-dtype", "--tp-size", "--pp-size",
}  # fmt: skip
LLAMA_FLAGS = {"-m", "-c", "-np", "-ngl", "-ctk", "-ctv", "-fa", "-sm"}
WITHOUT_VALUE = {"--enable-lora"}


def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    serve.add_arguments(parser)
    return parser


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
    words = [word for word in shlex.split(command.text) if not re.fullmatch(r"[A-Z0-9_]+=\w+", word)]
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
        assert 0 < float(flags["--gpu-memory-utilization"]) <= 1
    elif command.engine == "sglang":
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        assert 0 < float(flags_of(words[3:], SGLANG_FLAGS)["--mem-fraction-static"]) < 1
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
    ("gemma-3-12b", "rtx3060", {}),
    ("deepseek-v3", "h200", {"count": 8, "block_tokens": 32}),
    ("llama-3.1-8b-awq", "t4", {}),
]


@pytest.mark.parametrize(("model", "gpu", "settings"), QUESTIONS)
@pytest.mark.parametrize("version", [Vllm((0, 4), "v1"), Vllm((0, 11), "v1"), Vllm((0, 26), "v1"), Vllm()])
def test_every_command_parses(ask: Ask, model: str, gpu: str, settings: dict[str, object], version: Vllm) -> None:
    found = fit(ask(model, gpu, **settings))
    plans = [found] if found.fits else [way.fit for way in ways_out(found) if way.fit.fits]
    assert plans
    for one in plans:
        for command in commands(one, sequences=one.useful_sequences, vllm=version).values():
            check(command)


def test_the_flags_of_ways_out_are_those_of_plan(ask: Ask) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    plan.add_arguments(parser)
    asked = [ask(model, gpu, **settings) for model, gpu, settings in QUESTIONS]
    asked.append(ask("llama-3.1-8b", "rtx4090", max_model_len=40000))
    asked.append(ask("llama-3.1-70b", "h100-80", count=4, tensor_parallel=1))
    ways = [way for question in asked for way in ways_out(fit(question))]
    assert len({way.kind for way in ways}) >= 6
    for way in ways:
        parsed, unknown = parser.parse_known_args(shlex.split(way.flags))
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


def test_names_with_spaces_and_worse_are_quoted(ask: Ask) -> None:
    question = ask("llama-3-8b", "h100-80")
    question = replace(question, model=replace(question.model, name="./my models/it's; rm -rf $HOME", origin="folder"))
    for engine, command in commands(fit(question), sequences=1).items():
        words = shlex.split(command.text)
        if engine == "llama.cpp":
            assert "it's; rm -rf $HOME.gguf" in words
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
        assert shlex.split(pasted.replace("\\\n", " ")) == shlex.split(command.text)


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
    assert any("nothing off for graphs" in note for note in second.notes)
    assert not any("nothing off for graphs" in note for note in first.notes)


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


def test_what_has_to_be_made_is_said(ask: Ask) -> None:
    question = ask("llama-3-8b", "rtx4090")
    online = commands(fit(replace(question, model=quantized_as(question.model, "nf4"))), sequences=4)
    assert "--quantization bitsandbytes" in online["vllm"].text
    assert online["vllm"].available
    offline = commands(fit(replace(question, model=quantized_as(question.model, "awq"))), sequences=4)
    assert not offline["vllm"].available
    assert any("AWQ" in note for note in offline["vllm"].notes)


def test_llama_cpp_shares_its_context_among_slots(ask: Ask) -> None:
    found = fit(ask("llama-3.1-8b", "rtx4090", max_model_len=8192))
    words = shlex.split(commands(found, sequences=256)["llama.cpp"].text)
    slots, context = int(words[words.index("-np") + 1]), int(words[words.index("-c") + 1])
    assert context == slots * 8192
    assert context <= found.kv_tokens


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
