"""What proves a rule: the message itself, or its record on logs that were judged before the doctor read them."""

# ruff: noqa: E501

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.diagnosis.confidence import PROVEN, PROVEN_AGAIN, proven
from holdfast.doctor.findings import Finding
from holdfast.doctor.rules.load import Blind, Rule, rulebook

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-18-doctor-blind-records.json"
VLLM = "INFO 03-11 09:13:43 api_server.py:151] vLLM API server version 0.10.0"
SAYS = {
    "holdfast": "2026-11-18 14:15:10 INFO holdfast: holdfast 0.1.0",
    "vllm": VLLM,
    "llama.cpp": "build: 7585 (0f89d2ecf) with GNU 13.3.0 for Linux x86_64",
    "ollama": 'time=2026-01-20T13:24:50.423Z level=INFO source=routes.go:1511 msg="Listening on 127.0.0.1:11434 (version 0.12.6)"',
}


def _first(*lines: str) -> Finding:
    return diagnose_lines(list(lines), "log").findings[0]


def _rule(blind: Blind, settles: str = "", code: str = "") -> Rule:
    return msgspec.structs.replace(rulebook().rule("port_taken"), blind=blind, settles=settles, code=code)


@pytest.mark.parametrize(
    ("rule", "sure"),
    [
        (_rule(Blind()), False),
        (_rule(Blind(right=PROVEN - 1)), False),
        (_rule(Blind(right=PROVEN)), True),
        (_rule(Blind(right=50, wrong=1)), False),
        (_rule(Blind(right=PROVEN_AGAIN - 1, mended=1)), False),
        (_rule(Blind(right=PROVEN_AGAIN, mended=2)), True),
        (_rule(Blind(), settles="both_sides"), True),
        (_rule(Blind(mended=1), settles="remedy"), True),
        (_rule(Blind(wrong=1), settles="both_sides"), False),
        (_rule(Blind(), code="HF231"), True),
    ],
)
def test_a_rule_is_proven_by_its_message_or_its_record(rule: Rule, *, sure: bool) -> None:
    assert proven(rule) is sure


def test_the_records_of_the_rules_are_those_of_the_sets() -> None:
    answers = [one for one in json.loads(RECORDS.read_text(encoding="utf-8"))["answers"] if one["counts"]]
    right, wrong = (Counter(one["rule"] for one in answers if one["judged"] == which) for which in ("right", "wrong"))
    told = {rule.id: (rule.blind.right, rule.blind.wrong + rule.blind.mended) for rule in rulebook().rules}
    assert {name: counts for name, counts in told.items() if any(counts)} == {
        name: (right[name], wrong[name]) for name in right | wrong
    }


@pytest.mark.parametrize("rule", [rule for rule in rulebook().rules if rule.settles], ids=lambda rule: rule.id)
def test_a_message_that_settles_it_is_called_high(rule: Rule) -> None:
    said = SAYS[rule.engines[0] if rule.engines and rule.engines[0] in SAYS else "vllm"]
    found = [_first(said, example) for example in rule.examples]
    assert ("high", rule.cause) in {(one.confidence, one.cause) for one in found}


ELSEWHERE = {
    "a file": "llama_model_load: error loading model: tensor 'blk.2.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete",
    "a folder": "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/a'. Use `repo_type` argument if needed.",
    "a port": "Error: listen tcp 127.0.0.1:11434: bind: address already in use",
    "a name": "Error: pull model manifest: file does not exist",
    "a process": "ValueError: Free memory on device cuda:0 (5.92/79.19 GiB) on startup is less than desired GPU memory utilization (0.9, 71.27 GiB).",
    "a module": "ModuleNotFoundError: No module named 'vllm'",
    "a disk": "OSError: [Errno 28] No space left on device: '/home/user/.cache/huggingface/hub/blobs/1'",
}


@pytest.mark.parametrize("line", ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_what_speaks_of_a_thing_that_the_log_does_not_show_needs_a_record(line: str) -> None:
    assert _first(line).confidence == "medium"


CONTEXT = "This model's maximum context length is 8192 tokens. However, you requested 9200 tokens (8700 in the messages, 500 in the completion)."
LONG = "ValueError: The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that `max_model_len` is no smaller than the number of text tokens"


@pytest.mark.parametrize(
    ("line", "confidence"),
    [
        (f"openai.BadRequestError: Error code: 400 - {{'error': {{'message': \"{CONTEXT}\"}}}}", "high"),
        (f"{LONG}.", "high"),
        (
            "ValueError: This model's maximum context length is 3 tokens. However, your request has 8 input tokens.",
            "medium",
        ),
        (f"{LONG} plus multimodal tokens.", "medium"),
        ("the request exceeds the available context size, try increasing it", "medium"),
    ],
)
def test_a_request_with_both_its_lengths_is_told_by_whoever_passes_it_on(line: str, confidence: str) -> None:
    found = _first(line)
    assert (found.cause, found.confidence) == ("context_length_exceeded_request", confidence)


def test_ram_beyond_that_of_most_machines_is_not_to_be_freed() -> None:
    few, many = (
        _first(f"Error: model requires more system memory ({needed} GiB) than is available ({there} GiB)")
        for needed, there in (("9.8", "8.4"), ("996.3", "747.0"))
    )
    assert (few.confidence, many.confidence) == ("high", "medium")
    assert many.fix is not None
    assert "OLLAMA_NUM_PARALLEL=1" in many.fix.why


def test_an_input_beyond_the_batch_needs_both_figures() -> None:
    said = "srv    send_error: task id = 8, error: input{} is too large to process. increase the physical batch size{}"
    whole, bare = said.format(" (11257 tokens)", " (current batch size: 8192)"), said.format("", "")
    assert [_first(SAYS["llama.cpp"], line).confidence for line in (whole, bare)] == ["high", "medium"]
