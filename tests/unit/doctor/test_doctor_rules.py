"""Each rule by its own examples; and that what the rules say hangs together. Knows no rule by name but a few."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.evidence import holdfast_errors
from holdfast.doctor.logs.line import read_line
from holdfast.doctor.logs.sampling import worth_reading
from holdfast.doctor.rules.codes import codes
from holdfast.doctor.rules.formulas import evaluate, filled, holds, written
from holdfast.doctor.rules.load import ProbeRule, Rule, rulebook

CAUSES = """kv_cache_too_small_for_max_len, no_memory_for_kv_blocks, free_memory_below_utilization,
other_process_on_gpu, weights_do_not_fit, cuda_graph_capture_oom, activation_oom_runtime,
sampler_warmup_oom, multimodal_profiling_oom, lora_memory, speculative_memory, prompt_logprobs_oom,
fragmentation, host_ram_oom, shm_too_small, unified_memory, offload_noop, utilization_too_low,
utilization_too_high, tensor_parallel_mismatch, tensor_parallel_unused, gpu_topology,
heads_not_divisible, quant_shape_mismatch, dtype_unsupported_gpu, kernel_image_missing,
driver_too_old, nvcc_missing, slow_attention_backend, arch_unsupported, tokenizer_mismatch,
chat_template_missing, gated_or_missing_model, corrupt_download, context_length_exceeded_request,
encoder_cache_too_small, preemption_thrash, throughput_decay, prefix_caching_unused,
stream_buffered, not_ready_yet, nodes_apart, timeout_or_hang, lora_rank, bad_flag, other"""
ROOTS = {"configuration_overshoot", "kv_blowout", "concurrency_misjudged", "does_not_fit", "not_memory"}
PHASES = {"args", "download", "load", "profile", "capture", "warmup", "serve", "request", ""}
WANT_LESS = {
    "activation_oom_runtime", "cuda_graph_capture_oom", "sampler_warmup_oom", "speculative_memory",
    "prompt_logprobs_oom", "lora_memory", "fragmentation",
}  # fmt: skip
RULES = rulebook().rules
SEEN = [rule for rule in RULES if rule.patterns]
EXAMPLES = [(rule, example) for rule in SEEN for example in rule.examples]


def _named(value: object) -> str:
    return value.id if isinstance(value, Rule) else ""


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=_named)
def test_a_rule_sees_its_own_example(rule: Rule, example: str) -> None:
    assert worth_reading(example)
    assert rulebook().anything.search(example)
    assert rule.match(read_line(example, 1).text) is not None


JUDGED = [(rule, example) for rule, example in EXAMPLES if rule.id != holdfast_errors.RULE]


@pytest.mark.parametrize(("rule", "example"), JUDGED, ids=_named)
def test_an_example_alone_is_judged_by_its_rule(rule: Rule, example: str) -> None:
    found = diagnose_lines(example.split("\n") * rule.least, "example").findings
    assert rule.cause in {finding.cause for finding in found}
    assert all(finding.what and finding.why and "{" not in finding.what for finding in found)


def test_every_rule_has_an_example_and_a_source() -> None:
    assert [rule.id for rule in SEEN if not rule.examples] == []
    assert [rule.id for rule in RULES if not rule.source or not rule.what] == []
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_causes_phases_and_roots_are_those_of_the_documented_json() -> None:
    known = {name.strip() for name in CAUSES.replace("\n", " ").split(",")}
    assert known == set(rulebook().causes)
    assert {rule.cause for rule in RULES} <= known
    assert {rule.phase for rule in RULES} | {mark.phase for mark in rulebook().marks} <= PHASES
    assert {cause.root_cause for cause in rulebook().causes.values()} <= ROOTS
    page = (Path(__file__).parents[3] / "docs" / "doctor-json.md").read_text()
    rows = {
        f"| `{cause.name}` | {cause.code} | {cause.root_cause} | {cause.means} |"
        for cause in rulebook().causes.values()
    }
    assert sorted(rows - set(page.splitlines())) == []


def test_every_cause_but_two_has_a_rule() -> None:
    # How low a utilization starves is known to the planner, which judges commands.
    assert set(rulebook().causes) - {rule.cause for rule in RULES} <= {"utilization_too_low"}


@pytest.mark.parametrize("rule", RULES, ids=_named)
def test_the_sums_of_a_rule_can_be_worked_out(rule: Rule) -> None:
    for fix in rule.fix:
        holds(fix.when, {})
        for formula in fix.change.values():
            if isinstance(formula, str) and formula and not formula.startswith("'"):
                evaluate(formula, {})


@pytest.mark.parametrize("rule", RULES, ids=_named)
def test_no_fix_is_the_opposite_of_what_the_phase_needs(rule: Rule) -> None:
    """Too little KV: the utilization may only rise. Out of memory beside the KV: it may only fall."""
    wants_more = rule.cause in ("kv_cache_too_small_for_max_len", "no_memory_for_kv_blocks", "preemption_thrash")
    wants_less = rule.cause in WANT_LESS
    for fix in rule.fix:
        formula = fix.change.get("gpu-memory-utilization")
        if formula is None:
            continue
        for utilization in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95):
            numbers = {
                "utilization": utilization,
                "tried_gib": 1.0,
                "total_gib": 80.0,
                "others_gib": 10.0,
                "free_gib": 1.0,
            }
            if fix.engines == ("sglang",) or not holds(fix.when, numbers):
                continue
            value = evaluate(str(formula), numbers)
            assert value is not None
            assert not (wants_more and value < utilization)
            assert not (wants_less and value > utilization)


@pytest.mark.parametrize("rule", rulebook().probes, ids=lambda rule: rule.id)
def test_a_rule_over_what_was_probed_can_be_worked_out(rule: ProbeRule) -> None:
    assert rule.cause in rulebook().causes
    assert rule.also == "" or rulebook().fixes[rule.also]
    assert all(rule.what)
    assert all(rule.why)
    for fix in (*rule.fix, *rulebook().fixes.get(rule.also, ())):
        assert fix.why
        for formula in fix.change.values():
            evaluate(formula, {})
        holds(fix.when, {})
    for condition in (rule.when, *rule.surer.values()):
        holds(condition, {})


def test_weights_that_do_not_fit_are_never_answered_with_utilization() -> None:
    for rule in RULES:
        if rule.cause == "weights_do_not_fit":
            assert not any("gpu-memory-utilization" in fix.change for fix in rule.fix)


def test_explain_knows_every_code_of_the_doctor() -> None:
    from holdfast.observability.codes import codes as holdfasts

    known = {**holdfasts(), **codes()}
    assert {cause.code for cause in rulebook().causes.values()} <= set(known)
    assert all(code.means and code.helps for code in codes().values())


def test_sums() -> None:
    assert evaluate("round_down(kv_tokens, 16)", {"kv_tokens": 20019}) == 20016
    assert evaluate("hundredths(free_gib / total_gib - 0.004)", {"free_gib": 20.11, "total_gib": 23.65}) == 0.84
    assert evaluate("divides(heads, asked)", {"heads": 28, "asked": 8}) == 4
    assert evaluate("a + 1", {}) is None
    assert evaluate("a / 0", {"a": 1}) is None
    assert holds("known(a) and a > 2", {"a": 3})
    assert not holds("a > 2", {})
    assert written(0.84) == "0.84"
    assert written(20016.0) == "20016"
    assert filled(("{a} {b}", "{a}"), {"a": 1}) == "1"
    with pytest.raises(KeyError):
        evaluate("a ** 2", {"a": 2})
