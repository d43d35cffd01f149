"""Commands judged before they are run: what is wrong with them, and the command that is offered instead."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tiny_gguf import write_tiny_gguf

from holdfast.doctor.check_command.check import CommandMachine, judge, judge_command
from holdfast.doctor.check_command.flags import flag_findings, known_flags
from holdfast.doctor.check_command.refusals import no_model
from holdfast.doctor.command.parse import parse_command
from holdfast.doctor.findings import Diagnosis, Finding
from holdfast.doctor.report.text import without_keys
from holdfast.errors import ConfigurationError, ModelAccessError
from holdfast.hardware import nvidia

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SGLANG = f"python -m sglang.launch_server --model-path {LLAMA}"
MODULE = "python -m vllm.entrypoints.openai.api_server --model"


def _judged(command: str, gpu: str | None = "rtx4090", **machine: str) -> Diagnosis:
    return judge_command(command, machine=CommandMachine(gpu=gpu, **machine))


def test_what_fits_is_healthy() -> None:
    found = _judged(f"vllm serve {LLAMA} --max-model-len 8192")
    assert found.healthy
    assert not found.findings
    assert found.engine == "vllm"
    assert found.command == f"vllm serve {LLAMA} --max-model-len 8192"


def test_holdfast_is_judged_for_one_gpu_or_for_ranks_on_several() -> None:
    [finding] = _judged("holdfast serve Qwen/Qwen3-32B", gpu="rtx3090x2").findings
    assert finding.fix is not None
    assert finding.fix.command == "holdfast serve Qwen/Qwen3-32B-FP8 --tensor-parallel-size 2"
    assert _judged(finding.fix.command, gpu="rtx3090x2").healthy
    assert "holdfast serve Qwen/Qwen3-32B-AWQ" in [fix.command for fix in finding.alternatives]


@pytest.mark.parametrize("program", ["vllm serve", MODULE])
def test_a_context_that_does_not_fit_gets_the_longest_that_does(program: str) -> None:
    found = _judged(f"{program} {LLAMA} --max-model-len 131072 --port 9000")
    [finding] = found.findings
    assert finding.cause == "kv_cache_too_small_for_max_len"
    assert finding.confidence == "high"
    assert finding.fix is not None
    assert finding.fix.command is not None
    assert finding.fix.command.startswith(f"{program} {LLAMA}")
    assert "--port 9000" in finding.fix.command
    # What is offered has been planned, and is judged to be well.
    assert _judged(finding.fix.command).healthy
    longer = int(finding.fix.changes["--max-model-len"] or 0) + 4096
    assert not _judged(f"{program} {LLAMA} --max-model-len {longer}").healthy


def test_vllm_takes_the_whole_context_where_none_is_set() -> None:
    assert [one.cause for one in _judged(f"vllm serve {LLAMA}").findings] == ["kv_cache_too_small_for_max_len"]
    assert _judged(f"vllm serve {LLAMA} --max-model-len auto").healthy


@pytest.mark.parametrize("flag", ["--language-model-only", """--limit-mm-per-prompt '{"image": 0, "video": 0}'"""])
def test_no_room_is_kept_for_images_that_are_not_taken(flag: str) -> None:
    command = "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct --max-model-len 130000"
    assert not _judged(command, "h100-80").healthy
    assert _judged(f"{command} {flag}", "h100-80").healthy


def test_a_forgotten_tensor_parallel_size_is_named_once() -> None:
    found = _judged("vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 8192", "h100-80x4")
    [finding] = found.findings
    assert finding.cause == "tensor_parallel_unused"
    assert finding.fix is not None
    assert finding.fix.changes == {"--tensor-parallel-size": "2"}


@pytest.mark.parametrize(
    ("command", "gpu", "cause", "flag", "value"),
    [
        (f"vllm serve {LLAMA} --max-model-len 8192 -tp 3", "rtx4090x4", "heads_not_divisible", "-tp", "2"),
        (f"vllm serve {LLAMA} --max-model-len 8192 -tp 4", "rtx4090x2", "tensor_parallel_mismatch", "-tp", "2"),
        (f"{SGLANG} --tp 3", "h100-80x4", "heads_not_divisible", "--tp", "2"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --dtype bfloat16", "v100-32", "dtype_unsupported_gpu",
         "--dtype", "float16"),
        (f"{MODULE} {LLAMA} --max-model-len 8192 --dtype fp16", "h100-80", "bad_flag", "--dtype", "float16"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --gpu-memory-utilization 0.99", "h100-80", "utilization_too_high",
         "--gpu-memory-utilization", "0.95"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --gpu-memory-utilization 0.4", "h100-80", "utilization_too_low",
         "--gpu-memory-utilization", "0.9"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --gpu-memory-utilization 90", "h100-80", "bad_flag",
         "--gpu-memory-utilization", "0.9"),
        (f"vllm serve {LLAMA} --max-model-len 200000", "h100-80", "bad_flag", "--max-model-len", "131072"),
        (f"vllm serve {LLAMA} --max-model-len {'9' * 20}", "rtx4090", "bad_flag", "--max-model-len", "48544"),
        (f"vllm serve {LLAMA} --max-model-l 131072 --gpu-memory-u 0.9", "rtx4090", "kv_cache_too_small_for_max_len",
         "--max-model-l", "44672"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --max-num-seqz 5", "h100-80", "bad_flag", "--max-num-seqs", "5"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --tensor-par 3", "rtx4090x4", "heads_not_divisible", "--tensor-par",
         "2"),
        ("holdfast serve smollm2 --max-model-len 8192 --ram 200MiB", None, "no_memory_for_kv_blocks", "--ram", "MiB"),
    ],
)  # fmt: skip
def test_causes_and_what_is_offered(command: str, gpu: str | None, cause: str, flag: str, value: str) -> None:
    found = _judged(command, gpu)
    finding = next(one for one in found.findings if one.cause == cause)
    assert finding.fix is not None
    assert finding.fix.command is not None
    assert f"{flag} " in finding.fix.command
    assert value in finding.fix.command.split(f"{flag} ")[1]
    assert not any(one.cause == cause for one in _judged(finding.fix.command, gpu).findings)


def test_a_flag_that_vllm_once_took_is_told_apart_from_a_typing_error() -> None:
    found = _judged(f"vllm serve {LLAMA} --max-model-len 8192 --num-scheduler-steps 8")
    [finding] = found.findings
    assert finding.cause == "bad_flag"
    assert "no longer takes" in finding.what
    assert finding.fix is not None
    assert "--num-scheduler-steps" not in (finding.fix.command or "")


def test_a_beginning_of_several_flags_is_not_guessed() -> None:
    [finding] = _judged(f"vllm serve {LLAMA} --max-model-len 8192 --max-lor 1").findings
    assert finding.what == (
        "--max-lor is the beginning of several flags: --max-lora-cls-labels, --max-lora-rank, --max-loras"
    )
    assert finding.fix is not None
    assert finding.fix.changes == {}


def test_the_last_fix_has_those_before_it() -> None:
    found = _judged(f"vllm serve {LLAMA} --max-model-len 8192 --dtype fp16 --gpu-memory-utilization 0.99", "h100-80")
    assert [one.cause for one in found.findings] == ["bad_flag", "utilization_too_high"]
    last = found.findings[-1].fix
    assert last is not None
    assert "--dtype float16" in (last.command or "")
    assert "0.95" in (last.command or "")


def test_a_share_that_is_lowered_is_lowered_for_every_fix_and_said_beside_it() -> None:
    found = _judged(f"vllm serve {LLAMA} --gpu-memory-utilization 0.99", "l4")
    assert [one.cause for one in found.findings] == ["kv_cache_too_small_for_max_len", "utilization_too_high"]
    [fix, lower] = [one.fix for one in found.findings]
    assert fix is not None
    assert lower is not None
    assert fix.command == lower.command is not None
    assert _judged(fix.command, "l4").healthy  # Both at once, as they are offered.
    assert fix.why.endswith("in the same command, for the other findings: --gpu-memory-utilization 0.95")
    assert "budget 21.05 GiB (0.95 of 22.16 GiB)" in found.seen[0]
    assert "instead of 0.99" in found.seen[1]
    kept = _judged(f"vllm serve {LLAMA} --max-model-len 8192 --gpu-memory-utilization 0.95", vram="20GiB")
    assert " of " not in kept.seen[0].split("budget ")[1].split(",")[0]  # Set in bytes, it is no share.


@pytest.mark.skipif(bool(nvidia.probe().gpus), reason="there is a GPU to judge for")
def test_a_command_for_a_gpu_is_judged_for_a_cpu_with_doubt_and_that_is_said_first() -> None:
    text = f"vllm serve {LLAMA} --max-model-len 131072"
    found = judge_command(text, machine=CommandMachine(ram="20GiB"))
    assert found.seen[0].startswith("this machine has no GPU, so the command is checked for its CPU; --gpu NAME")
    assert [one.confidence for one in found.findings] == ["medium"]
    command = parse_command(text)
    assert command is not None
    here = judge(
        command, machine=CommandMachine(ram="20GiB"), runs_here=True
    )  # Rescue starts it here, whatever it is for.
    assert [one.confidence for one in here.findings] == ["high"]
    assert here.seen[0].startswith("planned for this machine")
    for said, version in ((f"VLLM_CPU_OMP_THREADS_BIND=all {text}", None), (text, "0.11.0+cpu")):
        meant = judge_command(said, machine=CommandMachine(ram="20GiB"), version=version)
        assert not any("has no GPU" in one for one in (*meant.seen, *meant.missing))


@pytest.mark.parametrize(
    ("flag", "value", "offered"),
    [("-fa", "maybe", "auto"), ("--flash-attn", "On", "on"), ("-ctk", "q8", "q8_0"), ("-sm", "columns", None)],
)
def test_values_that_llama_does_not_take_are_named_with_those_it_takes(
    flag: str, value: str, offered: str | None
) -> None:
    def judged(flags: str) -> list[Finding]:
        command = parse_command(f"llama-server -m model.gguf {flags}")
        assert command is not None
        return flag_findings(command, None)

    [finding] = judged(f"{flag} {value}")
    assert finding.cause == "bad_flag"
    assert f"{flag} does not take {value}: its values are " in finding.what
    assert finding.fix is not None
    assert finding.fix.changes == {flag: offered}
    for able in (f"{flag} {offered or 'row'}", "-fa on -fa true", "-fa $FLASH"):
        assert not judged(able)


@pytest.mark.parametrize(("version", "confidence"), [(None, "medium"), ("b7000", "high"), ("b6000", None)])
@pytest.mark.parametrize("flags", ["-fa", "-fa -c 4096", "--flash-attn --port 9000"])
def test_flash_attention_without_a_value_takes_the_next_word(
    flags: str, version: str | None, confidence: str | None
) -> None:
    command = parse_command(f"llama-server -m model.gguf {flags}")
    assert command is not None
    found = flag_findings(command, version)
    assert [one.confidence for one in found] == ([] if confidence is None else [confidence])
    for finding in found:
        assert finding.fix is not None
        assert (
            finding.fix.command
            == f"llama-server -m model.gguf {flags.replace(flags.split()[0], flags.split()[0] + ' on')}"
        )


def test_a_context_above_the_trained_one_is_a_warning_where_the_engine_only_warns() -> None:
    warned = _judged(f"llama-server -m {LLAMA} -c 262144", "h100-80")
    assert warned.healthy
    assert any("above the trained 131,072 tokens" in one for one in warned.seen)
    assert [one.cause for one in _judged(f"vllm serve {LLAMA} --max-model-len 262144", "h100-80").findings] == [
        "bad_flag"
    ]


def test_a_flag_that_was_replaced_is_written_as_it_is_now() -> None:
    command = parse_command("vllm serve BAAI/bge-m3 --task embed")
    assert command is not None
    [finding] = flag_findings(command, "0.15.0")
    assert finding.fix is not None
    assert finding.fix.command == "vllm serve BAAI/bge-m3 --runner pooling --convert embed"


def test_a_smaller_kv_space_of_vllm_on_a_cpu_is_seen() -> None:
    command = f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {LLAMA} --max-model-len 32768"
    found = judge_command(command, machine=CommandMachine(ram="64GiB"))
    [finding] = found.findings
    assert finding.cause == "kv_cache_too_small_for_max_len"
    assert finding.fix is not None
    assert finding.fix.changes == {"VLLM_CPU_KVCACHE_SPACE": "5"}
    assert (finding.fix.command or "").startswith("VLLM_CPU_KVCACHE_SPACE=5 vllm serve")
    assert finding.alternatives[0].changes == {"--max-model-len": "8064"}


def test_a_model_that_is_not_there_is_no_question_of_memory() -> None:
    found = _judged("llama-server -m /nowhere/model.gguf -c 8192", None)
    assert [(one.cause, one.root_cause) for one in found.findings] == [("gated_or_missing_model", "not_memory")]
    assert not found.healthy
    assert found.missing
    elsewhere = _judged("llama-server -m /nowhere/model.gguf -c 8192")
    assert (elsewhere.findings, elsewhere.healthy) == ([], False)
    assert "a path of that machine" in elsewhere.missing[0]


def test_a_hub_that_is_not_reached_says_nothing_of_the_model() -> None:
    command = parse_command("vllm serve owner/name")
    assert command is not None
    unreached = ModelAccessError(
        "owner/name cannot be fetched", code="HF222", found="no route", fix="see to the network"
    )
    assert no_model(command, unreached) == (
        [],
        ["the model: owner/name cannot be fetched (no route); see to the network"],
    )
    [gated], _ = no_model(command, ModelAccessError("owner/name is gated"))
    assert gated.cause == "gated_or_missing_model"


def test_what_holdfast_refuses_is_said_with_its_reason() -> None:
    found = _judged("holdfast serve --max-model-len 2048 --kv-transfer-config x", None, ram="4GiB")
    [finding] = found.findings
    assert finding.cause == "bad_flag"
    assert "stay where they were computed" in finding.why
    assert finding.fix is not None
    assert finding.fix.command == "holdfast serve --max-model-len 2048"
    taken = "--trust-remote-code --swap-space 4 --attention-backend FLASH_ATTN --tokenizer-mode mistral"
    assert _judged(f"holdfast serve --max-model-len 2048 {taken}", None, ram="4GiB").findings == []


def test_what_starts_no_server_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a command that starts a server"):
        judge_command("ls -la")


def test_flags_of_our_own_are_all_known() -> None:
    import argparse

    from holdfast.cli.commands import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    names = {name.lstrip("-") for action in parser._actions for name in action.option_strings if name.startswith("--")}
    plain = {name for name in names if "=" not in name and not name.startswith("no-")}
    assert plain <= known_flags("holdfast")


DRAFT = '{"model": "meta-llama/Llama-3.1-8B-Instruct", "num_speculative_tokens": 3}'
SMALL = '{"model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 3}'
KV = '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3}'
"""Its weights fit beside the model and 20,480 tokens; its KV of them does not."""
ROPE = '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}'
BIG = "meta-llama/Llama-3.1-70B-Instruct"


@pytest.mark.parametrize(
    ("command", "gpu", "cause"),
    [
        (f"vllm serve {LLAMA} --max-model-len 8192 --data-parallel-size 8", "h100-80x2", "tensor_parallel_mismatch"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --kv-cache-memory-bytes 100M", "rtx4090",
         "kv_cache_too_small_for_max_len"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --speculative-config '{DRAFT}'", "rtx4090", "speculative_memory"),
        (f"vllm serve Qwen/Qwen3-8B --max-model-len 20480 --speculative-config '{KV}'", "rtx4090",
         "speculative_memory"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --kv-cache-memory-bytes 12G", "rtx4090", "utilization_too_high"),
        (f"{SGLANG} --context-length 8192 --mem-fraction-static 0.3", "rtx4090", "no_memory_for_kv_blocks"),
        (f"{SGLANG} --context-length 32768 --mem-fraction-static 0.72", "rtx4090", "kv_cache_too_small_for_max_len"),
        (f"{SGLANG} --context-length 100000", "rtx4090", "kv_cache_too_small_for_max_len"),
        (f"{SGLANG} --mem-fraction-static 0.95", "rtx4090", "utilization_too_high"),
        (f"{SGLANG} --speculative-algorithm STANDALONE --speculative-draft-model-path {LLAMA}", "rtx4090",
         "speculative_memory"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --max-num-batched-tokens 128", "rtx4090", "bad_flag"),
        (f"vllm serve {LLAMA} --max-model-len 8192 --tensor-parallel-size 0", "rtx4090", "bad_flag"),
        ("llama-server -m x.gguf --fa", "rtx4090", "bad_flag"),
    ],
)  # fmt: skip
def test_what_a_plan_has_no_setting_for_is_reckoned(command: str, gpu: str, cause: str) -> None:
    finding = next(one for one in _judged(command, gpu).findings if one.cause == cause)
    assert finding.fix is not None
    assert finding.fix.command is not None
    assert not any(one.cause == cause for one in _judged(finding.fix.command, gpu).findings)


SEEN_SHARE = re.compile(
    r"([\d.]+) GiB free at start, static share ([\d.]+).*?: weights ([\d.]+) GiB, ([\d.]+) GiB for KV"
)


@pytest.mark.parametrize("share", [None, 0.8, 0.85, 0.9])
def test_sglang_divides_what_is_free_at_start_by_its_static_share(share: float | None) -> None:
    """Weights and KV are the share, steps and graphs have the rest; where none is set, SGLang chooses."""
    found = _judged(SGLANG if share is None else f"{SGLANG} --mem-fraction-static {share}")
    assert found.healthy
    seen = SEEN_SHARE.search(found.seen[0])
    assert seen is not None
    free, taken, weights, pool = map(float, seen.groups())
    assert taken == (0.845 if share is None else share)
    assert pool == pytest.approx(free * taken - weights, abs=0.02)


@pytest.mark.parametrize(
    ("flags", "pool"),
    [
        ("--kv-cache-memory-bytes 2G", "2.00 GiB for KV: some 16,384 tokens, 2.0 sequences of 8,192 at once"),
        ("--kv-cache-memory-bytes 100M", "100.00 MiB for KV: some 800 tokens"),
        (f"--speculative-config '{SMALL}'", "draft 2.30 GiB, 2.11 GiB for KV: some 13,822 tokens"),
    ],
)  # fmt: skip
def test_what_is_said_of_the_budget_has_the_pool_and_the_draft(flags: str, pool: str) -> None:
    assert pool in _judged(f"vllm serve {LLAMA} --max-model-len 8192 {flags}").seen[0]


def test_a_draft_file_of_llama_cpp_is_planned(tmp_path: Path) -> None:
    write_tiny_gguf(file := tmp_path / "tiny.gguf")
    drafting = _judged(f"llama-server -m {file} -md {file} -c 128 -ngl 99")
    assert drafting.healthy
    assert ", draft " in drafting.seen[0]
    assert not drafting.missing
    assert "--model-draft" in _judged(f"llama-server -m {file} -md {file}.gone -c 128 -ngl 99").missing[0]


@pytest.mark.parametrize(
    ("command", "gpu", "healthy", "named"),
    [
        (f"vllm serve {BIG} --max-model-len 8192 --quantization bitsandbytes", "h100-80", True, ""),
        (f"vllm serve {BIG} --max-model-len 8192 --cpu-offload-gb 100", "h100-80", False, "--cpu-offload-gb 100"),
        (f"vllm serve {LLAMA} --max-model-len $LEN", "rtx4090", False, "--max-model-len $LEN"),
        (f"vllm serve {LLAMA} --max-model-len 262144 --hf-overrides '{ROPE}'", "h100-80", False, "--hf-overrides"),
        ("docker run vllm/vllm-openai:v0.6.3 --model meta-llama/Meta-Llama-3-8B --swap-space 4 --num-scheduler-steps 8",
         "rtx4090", True, ""),
    ],
)  # fmt: skip
def test_what_is_not_planned_is_named(command: str, gpu: str, healthy: bool, named: str) -> None:
    found = _judged(command, gpu)
    assert (found.healthy, found.findings) == (healthy, [])
    assert named in " ".join(found.missing)
    assert found.seen[0].startswith(f"planned for {gpu}")


def test_a_flag_of_a_later_release_is_told_apart() -> None:
    command = f"vllm serve {LLAMA} --max-model-len 8192 --attention-backend FLASH_ATTN"
    [finding] = judge_command(command, machine=CommandMachine(gpu="rtx4090"), version="0.6.3").findings
    assert "does not take --attention-backend yet" in finding.what
    assert finding.fix is not None
    assert (finding.fix.command or "").startswith("VLLM_ATTENTION_BACKEND=FLASH_ATTN vllm serve")
    assert judge_command(command, machine=CommandMachine(gpu="rtx4090"), version="0.13.0").healthy


def test_several_faults_have_one_command_that_mends_all() -> None:
    command = f"vllm serve {BIG} --max-model-len 8192 -tp 3 --swap-space 4 --gpu-memory-utilization 95"
    found = _judged(command, "h100-80x4")
    commands = {one.fix.command for one in found.findings if one.fix is not None and one.fix.changes}
    assert commands == {f"vllm serve {BIG} --max-model-len 8192 -tp 2 --gpu-memory-utilization 0.95"}


def test_what_is_published_comes_before_what_has_to_be_made() -> None:
    [finding] = _judged("vllm serve Qwen/Qwen2.5-32B-Instruct").findings
    assert finding.fix is not None
    assert finding.fix.command is not None
    assert "Qwen2.5-32B-Instruct-AWQ" in finding.fix.command
    assert not any("tiers" in (fix.price or "") for fix in finding.alternatives)


def test_a_quote_that_is_not_closed_is_said() -> None:
    with pytest.raises(ConfigurationError, match="quote in the command is not closed"):
        judge_command("vllm serve 'unbalanced")


def test_what_only_vllm_quantizes_while_loading_is_not_offered_to_others() -> None:
    served = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server --model-path"}
    offered = {
        engine: judge_command(f"{start} microsoft/phi-4", machine=CommandMachine(gpu="rtx4090")).findings[0]
        for engine, start in served.items()
    }
    said = {
        engine: any("by vLLM" in fix.why for fix in (found.fix, *found.alternatives) if fix is not None)
        for engine, found in offered.items()
    }
    assert said == {"vllm": True, "sglang": False}


@pytest.mark.parametrize("key", ["--api-kye secret123", "--api_kye=secret123", "--apikye secret123"])
@pytest.mark.parametrize("engine", ["vllm", "holdfast"])
def test_a_key_behind_a_misspelt_flag_is_hidden_too(engine: str, key: str) -> None:
    found = without_keys(_judged(f"{engine} serve {LLAMA} {key} --max-model-len 100000000000"))
    assert found.findings[0].fix is not None
    assert "secret123" not in msgspec.json.encode(found).decode()
    assert '"${API_KEY:?}"' in (found.findings[0].fix.command or "")


def test_gpus_without_a_number_are_as_many_as_the_replicas_need() -> None:
    command = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 -dp 2"
    told = _judged(command, "h100-80")
    assert told.healthy
    assert not any("unused" in line for line in told.seen)
    assert _judged(command, "h100-80x1").findings[0].cause == "tensor_parallel_mismatch"


def test_a_model_s_own_draft_layers_are_planned_and_another_model_is_never_the_first_fix() -> None:
    drafting = '--speculative-config \'{"method":"mtp","num_speculative_tokens":1}\''
    [plain] = _judged("vllm serve deepseek-ai/DeepSeek-R1 -tp 8", "h100-80").findings
    told = _judged(f"vllm serve deepseek-ai/DeepSeek-R1 -tp 8 {drafting}", "h100-80")
    [finding] = told.findings
    assert not told.missing
    assert finding.numbers != plain.numbers
    assert finding.fix is not None
    assert "--model" not in finding.fix.changes
    assert any("shapes are not known" in one for one in _judged(f"vllm serve Qwen/Qwen3-8B {drafting}").missing)


@pytest.mark.parametrize(
    ("flags", "healthy"),
    [
        ("", False),
        ("--ram 64GiB", True),
        ("--no-offload", False),
        ("-ngl 20", True),
        ("-ngl 60", False),
        ("--ram 8GiB", False),
    ],
)
def test_layers_in_ram_are_no_fault_of_a_command(flags: str, healthy: bool) -> None:
    told = judge_command(f"holdfast serve llama-3.1-70b-awq {flags}", machine=CommandMachine(gpu="rtx4090"))
    assert told.healthy is healthy
    assert bool(told.findings) is not healthy


def test_a_folder_without_weights_is_found_as_serve_refuses_it(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, **shape}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    found = judge_command(f"holdfast serve {tmp_path}")
    assert [one.what for one in found.findings] == [f"{tmp_path} has a config but no weight files"]
    assert not found.healthy
    assert not judge_command(f"holdfast serve {tmp_path} --load-format dummy").findings
    assert not _judged(f"holdfast serve {tmp_path}").findings  # For another machine: so may the folder be.


@pytest.mark.parametrize(
    ("flags", "code", "fixed"),
    [
        ("-ngl 20 --n-cpu-moe 3", "HF135", "holdfast serve llama-3.1-70b-awq"),
        ("--no-offload --n-cpu-moe 3", "HF135", "holdfast serve llama-3.1-70b-awq --no-offload"),
        ("--n-cpu-moe 3", "HF137", "holdfast serve llama-3.1-70b-awq"),
    ],
)
def test_what_serve_would_refuse_is_the_finding(flags: str, code: str, fixed: str) -> None:
    found = _judged(f"holdfast serve llama-3.1-70b-awq {flags}", gpu="a100-80gb")
    assert code in found.findings[0].evidence[0].line
    assert found.findings[0].fix is not None
    assert found.findings[0].fix.command == fixed
    assert not found.missing


def test_a_gpu_that_is_not_known_is_no_fault_of_the_command() -> None:
    found = _judged("holdfast serve llama-3.1-8b", gpu="rtxfoo")
    assert not found.findings
    assert "rtxfoo" in found.missing[0]


@pytest.mark.parametrize(
    ("command", "fixed"),
    [
        ("vllm serve M --ctx-size 8192 -ngl 99", "vllm serve M --max-model-len 8192"),
        ("llama-server -m M --max-model-len 4096", "llama-server -m M --ctx-size 4096"),
        ("holdfast serve M --mem-fraction-static 0.8", "holdfast serve M --gpu-memory-utilization 0.8"),
        (
            "python -m sglang.launch_server --model-path M --max-model-len 8192 --gpu-memory-utilization 0.8",
            "python -m sglang.launch_server --model-path M --context-length 8192 --mem-fraction-static 0.8",
        ),
    ],
)
def test_a_flag_of_another_engine_is_translated(command: str, fixed: str) -> None:
    parsed = parse_command(command)
    assert parsed is not None
    changes = {flag: value for one in flag_findings(parsed, None) if one.fix for flag, value in one.fix.changes.items()}
    assert parsed.with_changes(changes) == fixed


def test_a_disk_of_the_command_holds_what_ram_does_not(tmp_path: Path) -> None:
    command = "holdfast serve smollm2 --device cpu --ram 940MiB"
    assert not _judged(command, None).healthy
    assert _judged(f"{command} --nvme-path {tmp_path}", None).healthy
    assert not _judged(f"{command} --nvme-path {tmp_path} --nvme 1MiB", None).healthy


def test_a_folder_of_another_machine_is_not_looked_for_here(tmp_path: Path) -> None:
    command = "holdfast serve llama-3.1-70b-awq --device cuda --ram 12734MiB"
    there = f"{command} --nvme-path {tmp_path / 'there'}"
    found = _judged(there, ram="16GiB")
    assert found.healthy
    assert "of these from NVMe" in found.seen[-1]
    assert not _judged(f"{there} --nvme 1GiB", ram="16GiB").healthy
    # What is named is a flag of the command's, not of a plan's.
    assert "--nvme-path DIR names a disk" in _judged(command, ram="16GiB").seen[-1]
