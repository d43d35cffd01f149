"""Every command that is offered can be pasted: it is read again, its flags are of that release, its limits go together.

And what a log says was given stands in it, with nothing that was not.
"""

# ruff: noqa: E501

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from holdfast.doctor.check_command.flags import flag_findings
from holdfast.doctor.command.parse import parse_command
from holdfast.doctor.diagnosis.diagnose import diagnose, diagnose_lines
from holdfast.doctor.findings import Finding
from holdfast.doctor.rules.load import rulebook
from holdfast.engine_profiles.profile import profile

START = {
    "0.6.3": "INFO 08-01 10:00:00 api_server.py:339] vLLM API server version 0.6.3\nINFO 08-01 10:00:00 api_server.py:340] args: Namespace(model='Qwen/Qwen2.5-7B-Instruct', api_key='sk-x', max_model_len=8192, max_num_seqs=256, tensor_parallel_size=1)\n",
    "0.32.0": "INFO 10-01 10:00:00 [api_server.py:1839] vLLM API server version 0.32.0\nINFO 10-01 10:00:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen2.5-7B-Instruct', 'api_key': ['sk-x'], 'max_num_seqs': 1024, 'max_num_batched_tokens': 1024}\n",
}
EXAMPLES = [(rule.id, example) for rule in rulebook().rules for example in rule.examples]
"""Of every rule, with every fix that it has in each of the releases."""


def _fixes(finding: Finding) -> list[str]:
    every = [fix for fix in (finding.fix, *finding.alternatives) if fix is not None and fix.changes]
    return [fix.command for fix in every if fix.command is not None]


@pytest.mark.parametrize("version", START)
def test_every_fix_of_every_rule_is_a_command_of_that_release(version: str) -> None:
    tried = 0
    for name, example in EXAMPLES:
        diagnosis = diagnose_lines([*START[version].split("\n"), example], "log")
        for command in (text for finding in diagnosis.findings for text in _fixes(finding)):
            read = parse_command(command)
            assert read is not None, (name, command)
            assert "sk-x" not in command, (name, command)
            assert shlex.split(command), (name, command)
            if read.engine != "vllm" or diagnosis.engine != "vllm":
                continue
            tried += 1
            lacking = [flag.name for flag in read.flags if profile("vllm").takes(flag.name, version) is False]
            assert not lacking, (name, command)
            tokens, sequences = read.value("max-num-batched-tokens"), read.value("max-num-seqs")
            assert int(tokens or 10**9) >= int(sequences or 1), (name, command)
            bad = [one.what for one in flag_findings(read, version) if one.cause == "bad_flag"]
            assert not bad, (name, command, bad)
            size = read.value("tensor-parallel-size")
            assert size in (None, "1", "2", "4"), (name, command)  # 28 heads, 4 of KV.
    assert tried > 60


TOO_LONG = "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (11200). Try increasing `gpu_memory_utilization`"
V1 = "INFO 10-01 10:00:00 [api_server.py:1839] vLLM API server version {}\nINFO 10-01 10:00:00 [utils.py:233] non-default args: {}\n"
GIVEN = {
    "old": (
        "INFO 08-01 10:00:00 api_server.py:339] vLLM API server version 0.6.3\nINFO 08-01 10:00:00 api_server.py:340] args: Namespace(subparser='serve', model_tag='q/w', config='', host='127.0.0.1', port=8000, api_key='sk-prod', lora_modules=[LoRAModulePath(name='sql', path='/a', base_model_name=None)], enable_auto_tool_choice=True, tool_call_parser='hermes', model='q/w', load_format='auto', dtype='auto', max_model_len=32768, served_model_name=['prod'], gpu_memory_utilization=0.9, ssl_keyfile='/k.pem', rope_scaling={'rope_type': 'yarn'}, tensor_parallel_size=1, enable_chunked_prefill=False)",
        "vllm serve q/w --host 127.0.0.1 --api-key \"${API_KEY:?}\" --lora-modules sql=/a --enable-auto-tool-choice --tool-call-parser hermes --max-model-len 11200 --served-model-name prod --ssl-keyfile /k.pem --rope-scaling '{\"rope_type\": \"yarn\"}' --enable-chunked-prefill=False",
    ),
    "new": (
        V1.format("0.11.0", "{'model': 'q/w', 'enable_prefix_caching': False, 'served_model_name': ['a', 'b'], 'lora_modules': [LoRAModulePath(name='sql', path='/a', base_model_name=None)], 'max_model_len': 32768, 'compilation_config': {'level': 3}, 'api_key': ['k1', 'k2'], 'limit_mm_per_prompt': {'image': 2}}"),
        "vllm serve q/w --no-enable-prefix-caching --served-model-name a b --lora-modules sql=/a --max-model-len 11200 --compilation-config '{\"level\": 3}' --api-key \"${API_KEY:?}\" \"${API_KEY:?}\" --limit-mm-per-prompt '{\"image\": 2}'",
    ),
    "oldest": (
        "INFO 05-12 02:58:11 api_server.py:151] vLLM API server version 0.4.2\nINFO 05-12 02:58:12 llm_engine.py:98] Initializing an LLM engine (v0.4.2) with config: model='q/w', speculative_config=None, dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, quantization=None)",
        "python -m vllm.entrypoints.openai.api_server --model q/w --max-model-len 11200",
    ),
    "a unit's status": (
        "   Process: 99 ExecStart=/v/bin/vllm serve q/w --max-model-len 32768 --port 80 (code=exited, status=1/FAILURE)",
        "/v/bin/vllm serve q/w --max-model-len 11200 --port 80",
    ),
    "lines that go on": (
        "+ vllm serve q/w \\\n    --max-model-len 32768 \\\n    --api-key $KEY \\\n    --port 80",
        "vllm serve q/w --max-model-len 11200 --api-key $KEY --port 80",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_the_command_of_a_log_keeps_what_was_given(case: str) -> None:
    text, command = GIVEN[case]
    [finding] = diagnose_lines([*text.split("\n"), TOO_LONG], "log").findings
    assert finding.fix is not None
    assert finding.fix.command == command


TGI = """2026-03-08T03:12:01.123456Z  INFO text_generation_launcher: Args {
    model_id: "q/w",
    revision: None,
    sharded: None,
    num_shard: Some(
        4,
    ),
    quantize: None,
    trust_remote_code: false,
    hostname: "tgi-0",
    port: 80,
}
Error: Warmup(Generation("Not enough memory to handle 8192 prefill tokens. You need to decrease `--max-batch-prefill-tokens`"))"""


@pytest.mark.parametrize("form", ["several lines", "one line"])
def test_arguments_as_rust_prints_them(form: str) -> None:
    text = (
        TGI if form == "several lines" else TGI.replace("\n    ", " ").replace(",\n}", " }").replace("(    4, )", "(4)")
    )
    fix = diagnose_lines(text.split("\n"), "log").findings[0].fix
    assert fix is not None
    assert fix.command is not None
    assert fix.command.startswith("text-generation-launcher --model-id q/w ")
    assert "--num-shard 4 --port 80 --max-batch-prefill-tokens 4096" in fix.command
    assert "your other flags" not in fix.why


def test_arguments_that_are_cut_take_no_line_of_a_traceback() -> None:
    lines = TGI.split("\n")
    code = ['  File "/usr/src/server/models.py", line 1, in warmup', "    _, batch, kept = self.token(batch)"]
    fix = diagnose_lines([*lines[:4], *code, lines[-1]], "log").findings[0].fix
    assert fix is not None
    assert fix.command == "text-generation-launcher --model-id q/w --max-batch-prefill-tokens 4096"
    assert "; and your other flags" in fix.why


def test_arguments_of_several_lines_in_a_file_are_read_whole(tmp_path: Path) -> None:
    """Of a file only lines that could matter are read, and a number alone is none."""
    log = tmp_path / "tgi.log"
    log.write_text("\n".join(f"tgi-1  | {line}" for line in TGI.split("\n")))
    fix = diagnose([str(log)]).findings[0].fix
    assert fix is not None
    assert "--num-shard 4 --port 80 --max-batch-prefill-tokens 4096" in (fix.command or "")


OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of 23.64 GiB of which 311.81 MiB is free. Of the allocated memory 22.41 GiB is allocated by PyTorch, and 18.02 MiB is reserved by PyTorch but unallocated."
HOLDS = {
    "KV would no longer hold one request": (
        V1.format("0.8.5", "{'model': 'q/w', 'max_model_len': 16384, 'gpu_memory_utilization': 0.97, 'max_num_batched_tokens': 16384}")
        + "INFO 10-03 03:12:22 [kv_cache_utils.py:634] GPU KV cache size: 17,040 tokens\nINFO: Application startup complete.\n" + OUT.format(864),
        {"--max-num-batched-tokens": "8192"},
    ),
    "the weights are more than the share": (
        "INFO 03-11 03:00:40 model_runner.py:1077] Loading model weights took 14.9888 GB\nINFO 03-11 03:00:44 worker.py:232] Memory profiling results: total_gpu_memory=15.77GiB initial_memory_usage=15.21GiB peak_torch_memory=16.19GiB memory_usage_post_profile=15.26GiB non_torch_memory=0.24GiB kv_cache_size=-2.24GiB gpu_memory_utilization=0.90\nValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        {"--tensor-parallel-size": "2"},
    ),
    "KV heads do not split over 7": (
        V1.format("0.11.0", "{'model': 'Qwen/Qwen2.5-7B-Instruct', 'tensor_parallel_size': 8}")
        + "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        {"--tensor-parallel-size": "4"},
    ),
    "Gemma 2 is refused in float16": (
        "INFO 01-17 03:00:01 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: model='google/gemma-2-2b-it', dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=1\nValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.",
        {"--dtype": "float32"},
    ),
    "what llama.cpp's device holds": (
        "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3060) - 11756 MiB free\nsrv    load_model: loading model '/m/x.gguf'\nload_tensors: offloaded 33/33 layers to GPU\nload_tensors:        CUDA0 model buffer size =  7605.33 MiB\nllama_context: n_ctx         = 65536\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 8192.00 MiB on device 0: cudaMalloc failed: out of memory\ninit: failed to allocate buffer for kv cache",
        {"--ctx-size": "28160"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOLDS)
def test_a_fix_that_the_numbers_are_against_is_not_offered(case: str) -> None:
    text, changes = HOLDS[case]
    finding = diagnose_lines(text.split("\n"), "log").findings[0]
    assert finding.fix is not None
    assert finding.fix.changes == changes


SHELL = {
    "vllm serve q \\\n  --port 80 \\\n  --api-key \"$(cat /s)\"\n": "vllm serve q --port 80 --api-key \"$(cat /s)\" --seed 1",
    "cd /srv && . v/bin/activate && HF_HOME=/d vllm serve q 2>&1 | tee log": "cd /srv && . v/bin/activate && HF_HOME=/d vllm serve q --seed 1 2>&1 | tee log",
    "ExecStart=/v/bin/vllm serve q --api-key=$KEY": "/v/bin/vllm serve q --api-key=$KEY --seed 1",
    "sudo -E env A=1 nohup vllm serve q &": "sudo -E env A=1 nohup vllm serve q --seed 1 &",
    "bash -c 'exec vllm serve q'": "bash -c 'exec vllm serve q --seed 1'",
    "HF_TOKEN=hf_x vllm serve q": "HF_TOKEN=\"${HF_TOKEN:?}\" vllm serve q --seed 1",
    "HF_TOKEN=$T vllm serve q": "HF_TOKEN=$T vllm serve q --seed 1",
    "image: vllm/vllm-openai:v0.4.2\nargs:\n- --model=q\n- --port\n- \"80\"\n": "python -m vllm.entrypoints.openai.api_server --model=q --port 80 --seed 1",
    "command: [\"vllm\", \"serve\", \"q\", \"--port\", \"80\"]": "vllm serve q --port 80 --seed 1",
}  # fmt: skip


@pytest.mark.parametrize("text", SHELL)
def test_a_command_is_written_again_as_a_shell_takes_it(text: str) -> None:
    command = parse_command(text, strict=True)
    assert command is not None
    assert command.with_changes({"--seed": "1"}) == SHELL[text]


def test_the_tag_of_an_image_is_the_version_and_variables_go_into_the_container() -> None:
    command = parse_command("docker run --gpus all -e HF_TOKEN=abc vllm/vllm-openai:v0.6.3 --model q")
    assert command is not None
    assert command.version == "0.6.3"
    changed = command.with_changes({"NCCL_DEBUG": "INFO"})
    assert (
        changed
        == 'docker run -e NCCL_DEBUG=INFO --gpus all -e HF_TOKEN="${HF_TOKEN:?}" vllm/vllm-openai:v0.6.3 --model q'
    )


def test_a_misspelt_flag_is_put_right_and_its_secret_is_not_told() -> None:
    lines = [
        "$ vllm serve q --max-model-lenn 4096 --api-keyy sk-x",
        "vllm: error: unrecognized arguments: --max-model-lenn 4096 --api-keyy sk-x",
    ]
    [finding] = diagnose_lines(lines, "log").findings
    assert finding.fix is not None
    assert finding.fix.command == 'vllm serve q --max-model-len 4096 --api-key "${API_KEY:?}"'
    assert finding.fix.why == "the flag is spelled --max-model-len, --api-key"


@pytest.mark.parametrize(
    ("line", "fixed"),
    [
        (
            "launch_server.py: error: unrecognized arguments: --max-model-len 8192 --gpu-memory-utilization 0.85",
            "python -m sglang.launch_server --model-path MODEL --context-length 8192 --mem-fraction-static 0.85",
        ),
        ("vllm serve: error: unrecognized arguments: --ctx-size 8192 -ngl 99", "vllm serve MODEL --max-model-len 8192"),
    ],
)
def test_a_flag_of_another_engine_is_translated_with_its_value(line: str, fixed: str) -> None:
    usage = "usage: launch_server.py [-h]" if "launch_server" in line else "usage: vllm serve [model_tag] [options]"
    [finding] = diagnose_lines([usage, line], "log").findings
    assert finding.fix is not None
    assert finding.fix.command == fixed


def test_without_its_value_a_flag_of_another_engine_is_named() -> None:
    [finding] = diagnose_lines(["error: invalid argument: --max-model-len"], "log").findings
    assert finding.fix is not None
    assert "here it is --ctx-size, with the same value" in finding.fix.why


def test_a_model_type_is_told_the_first_release_that_serves_its_class() -> None:
    lines = ["INFO 01-10 09:12:05 api_server.py:651] vLLM API server version 0.6.4", "KeyError: 'qwen3_moe'"]
    [finding] = diagnose_lines(lines, "log").findings
    assert finding.fix is not None
    assert (finding.fix.command, finding.fix.basis) == ("pip install --upgrade 'vllm>=0.8.4'", "stated")
    assert [one.basis for one in finding.alternatives] == ["usual"]
