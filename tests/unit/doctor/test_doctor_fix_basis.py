"""What a fix rests on, and that an answer is called no surer than its first fix."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import SURE, Diagnosis, Finding, Fix, overall
from holdfast.doctor.report.text import lines
from holdfast.doctor.rules.load import rulebook
from holdfast.engine_profiles.profile import profile

pytestmark = pytest.mark.usefixtures("every_rule_proven")

VLLM = "INFO 11-01 10:00:00 [api_server.py:1805] vLLM API server version 0.11.0"
OLD_VLLM = VLLM.replace("0.11.0", "0.7.3")
KV = (
    "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed,"
    " which is larger than the available KV cache memory (2.00 GiB). Based on the available memory, the estimated"
    " maximum model length is {}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when"
    " initializing the engine."
)
REFUSED = "ValueError: Model architectures ['{}'] are not supported for now. Supported architectures: dict_keys(['X'])"
UNKNOWN = "llama_model_load: error loading model: error loading model architecture: unknown model architecture: '{}'"
FLAGS = "launch_server.py: error: unrecognized arguments: {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    lines: tuple[str, ...]
    basis: str | None
    confidence: str
    cause_confidence: str = "high"
    command: str = ""
    """In the first fix."""
    why: str = ""


CASES = {
    "a number of the log": Case(
        lines=(VLLM, KV.format(16384)), basis="computed", confidence="high", command="--max-model-len 16384"
    ),
    "a context that nobody can use is not offered": Case(
        lines=(VLLM, KV.format(256)), basis="first_try", confidence="medium", command="--tensor-parallel-size 2"
    ),
    "what the message asks for": Case(
        lines=(VLLM, "(VllmWorkerProcess pid=88) RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use"
               " CUDA with multiprocessing, you must use the 'spawn' start method"),
        basis="stated", confidence="high", command="VLLM_WORKER_MULTIPROC_METHOD=spawn",
    ),
    "a command that only shows something": Case(
        lines=(VLLM, "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
        basis="look", confidence="medium", command="python -c",
    ),
    "the release that serves a class": Case(
        lines=(OLD_VLLM, REFUSED.format("Gemma3ForConditionalGeneration")),
        basis="stated", confidence="high", command="vllm>=0.8.0",
    ),
    "a class that this release has": Case(
        lines=(VLLM, REFUSED.format("Gemma3ForConditionalGeneration")), basis="usual", confidence="medium",
        command="pip install --upgrade vllm transformers",
    ),
    "a class that no release has": Case(
        lines=(VLLM, REFUSED.format("LlavaQwenForCausalLM")), basis="usual", confidence="medium", why="is not in vllm",
    ),
    "a class that newer releases have no more": Case(
        lines=(OLD_VLLM, REFUSED.format("MllamaForConditionalGeneration")), basis="usual", confidence="medium",
        command="vllm==0.10.2",
    ),
    "a class of which the message tells the last release": Case(
        lines=(VLLM, "ValueError: Model architecture MllamaForConditionalGeneration was supported in vLLM until"
               " v0.10.2, and is not supported anymore. Please use an older version of vLLM."),
        basis="stated", confidence="high", command="vllm==0.10.2",
    ),
    "a class of a plugin": Case(
        lines=(VLLM, "ValueError: Model architecture BartForConditionalGeneration is not supported in-tree anymore."
               " Please install the plugin at https://github.com/vllm-project/bart-plugin if you want to use it."),
        basis="stated", confidence="high", command="vllm-project/bart-plugin",
    ),
    "a class of a plugin, refused by a release before it": Case(
        lines=(OLD_VLLM, REFUSED.format("BartForConditionalGeneration")), basis="usual", confidence="medium",
        why="its fork or plugin",
    ),
    "an architecture of newer builds": Case(
        lines=(UNKNOWN.format("gemma4"), "srv    load_model: failed to load model, 'm.gguf'"), basis="stated",
        confidence="high", why="a newer build serves it",
    ),
    "an architecture, where nothing is of Ollama": Case(
        lines=(UNKNOWN.format("gemma4"),), basis="stated", confidence="high", why="a newer build serves it",
    ),
    "an architecture that Ollama's runner may read otherwise": Case(
        lines=("time=2026-05-01T10:00:00Z level=INFO source=server.go:1 msg=starting", UNKNOWN.format("gemma4")),
        basis="usual", confidence="medium", why="a newer Ollama",
    ),
    "an architecture of newer builds, in a file that those do not read either": Case(
        lines=(UNKNOWN.format("gemma4"),
               "llama_model_load: error loading model: wrong number of tensors; expected 9, got 7"),
        basis="usual", confidence="medium", cause_confidence="medium", why="another copy of the model",
    ),
    "an architecture of no build": Case(
        lines=(UNKNOWN.format("qwen_image"),), basis="usual", confidence="medium", why="not in llama.cpp",
    ),
    "a flag that is to be left out": Case(
        lines=(VLLM, "vllm: error: unrecognized arguments: --swap-space`"), basis="stated", confidence="high",
        command="vllm serve", why="--swap-space: leave it out",
    ),
    "a flag that newer releases replaced, or older ones have not": Case(
        lines=("vllm serve m --guided-decoding-backend outlines",
               "vllm: error: unrecognized arguments: --guided-decoding-backend outlines"),
        basis="first_try", confidence="medium", why="newer releases have --structured-outputs-config",
    ),
    "a flag spelled with underscores, of a command that is not shown": Case(
        lines=(FLAGS.format("--max_prefill_tokens 32768"),), basis="stated", confidence="high",
        command="--max-prefill-tokens 32768",
    ),
    "a flag that may be of a newer release": Case(
        lines=(FLAGS.format("--speculative-adaptive"),), basis="first_try", confidence="medium",
    ),
    "a flag that took the next one, in a message of two lines": Case(
        lines=('error while handling argument "-fa":', "error: unknown value for --flash-attn: '-ctk'"),
        basis="stated", confidence="high", command="--flash-attn on",
    ),
    "one of the values that the message lists": Case(
        lines=("vllm serve: error: argument --block-size: invalid choice: 256 (choose from 1, 8, 16)",),
        basis="stated", confidence="high", why="--block-size with one of those that this version takes: 1, 8, 16",
    ),
    "a value that the model may need": Case(
        lines=("vllm serve: error: argument --quantization: invalid choice: 'new' (choose from 'awq', 'gptq')",),
        basis="usual", confidence="medium", why="a newer release may take new",
    ),
    "the model that Ollama has not": Case(
        lines=('{"error":"model \'qwen9\' not found, try pulling it first"}',), basis="usual", confidence="medium",
        command="ollama list; ollama pull qwen9",
    ),
    "a gated model": Case(
        lines=(VLLM, "OSError: You are trying to access a gated repo."), basis="stated", confidence="high",
        why="accept the licence, or ask for access",
    ),
    "a gated model that the message names": Case(
        lines=(VLLM, "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
               "Cannot access gated repo for url https://huggingface.co/an/other/resolve/main/config.json."),
        basis="stated", confidence="high", why="huggingface.co/an/other",
    ),
    "a gated model whose authors have not answered": Case(
        lines=(VLLM, "OSError: You are trying to access a gated repo.",
               "Your request to access model an/other is awaiting a review from the repo authors."),
        basis="stated", confidence="high", why="wait until",
    ),
    "a port that the log does not name": Case(
        lines=("E srv    start: couldn't bind HTTP server socket",), basis="first_try", confidence="medium",
        cause_confidence="medium",
    ),
    "tensors that the build does not expect": Case(
        lines=("llama_model_load: error loading model: missing tensor 'blk.0.ssm_dt.bias'",), basis="usual",
        confidence="medium", cause_confidence="medium", why="a newer build",
    ),
}  # fmt: skip


def _first(*log: str) -> Finding:
    return diagnose_lines(list(log), "log").findings[0]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_fix_says_what_it_rests_on(case: Case) -> None:
    found = _first(*case.lines)
    assert found.fix is not None
    assert (found.fix.basis, found.confidence, found.cause_confidence) == (
        case.basis, case.confidence, case.cause_confidence,
    )  # fmt: skip
    assert case.command in (found.fix.command or "")
    assert case.why in found.fix.why


def test_an_answer_is_no_surer_than_its_first_fix() -> None:
    assert overall("high", None) == "medium"
    assert overall("high", Fix(why="try it")) == "medium"
    assert overall("low", Fix(why="try it")) == "low"
    assert {overall("high", Fix(basis=basis)) for basis in SURE} == {"high"}
    assert [Fix(basis="computed", first_try=True).first_try, Fix(basis="look").first_try] == [False, True]


def _told(diagnosis: Diagnosis) -> str:
    return " ".join(" ".join(lines(diagnosis)).split())


def test_the_report_says_it_too() -> None:
    sure = _told(diagnose_lines([VLLM, KV.format(16384)], "log"))
    assert "confidence high " in sure
    assert "[computed from what was seen]" in sure
    unsure = _told(diagnose_lines([VLLM, CASES["a command that only shows something"].lines[1]], "log"))
    assert "confidence medium (the cause: high; its fix is not sure)" in unsure
    assert "[no fix yet: it shows what has to be changed]" in unsure


def _is_number(value: object) -> bool:
    return str(value).replace(".", "").isdigit()


def test_a_number_that_is_made_of_none_is_not_called_stated_by_a_rule() -> None:
    """A literal number may be right or not: a rule may say that the message asks for it, no more than these do."""
    told = [
        rule.id
        for rule in rulebook().rules
        for fix in rule.fix
        if fix.basis == "stated" and any(_is_number(value) for value in fix.change.values())
    ]
    assert told == ["swap_too_large", "utilization_high"]


def test_engines_name_the_architectures_they_serve() -> None:
    vllm = profile("vllm")
    assert (vllm.serves("Qwen3ForCausalLM"), vllm.serves_since("Qwen3ForCausalLM")) == (True, "0.8.4")
    assert (vllm.serves("NoSuchForCausalLM"), vllm.serves_since("NoSuchForCausalLM")) == (False, None)
    assert (vllm.serves("QWenLMHeadModel"), vllm.served_until("QWenLMHeadModel")) == (False, "0.23.0")
    assert profile("llama.cpp").serves("qwen3moe")
    assert profile("tgi").serves("LlamaForCausalLM") is None


def test_a_newer_build_is_offered_once() -> None:
    (finding,) = diagnose_lines(["build: 3400 (abcdef12) with cc", UNKNOWN.format("qwen3")], "log").findings
    assert finding.fix is not None
    assert "llama.cpp" in finding.fix.why
    assert not [one.why for one in finding.alternatives if "a newer build" in one.why]
