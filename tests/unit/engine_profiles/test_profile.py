"""Profiles of engines: what one file says agrees with the others, and the loader reads no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from holdfast.engine_profiles import profile as module
from holdfast.engine_profiles.profile import engines, profile, release, release_of, spelled_release

ENGINES = ("vllm", "sglang", "tgi", "llama.cpp", "ollama", "holdfast")
LISTED = ("vllm", "sglang", "llama.cpp")
KINDS = {"length", "whole", "share", "dtype", "kv-dtype", "choice"}
NOT_IN_THE_NEWEST = {"rope-scaling"}


def test_every_engine_that_can_be_started_has_a_profile() -> None:
    assert tuple(engines()) == ENGINES
    assert all(profile(engine).data for engine in ENGINES)
    assert not profile("another").data
    assert profile("another").takes("port") is None


@pytest.mark.parametrize("engine", LISTED)
def test_flags_that_a_profile_names_are_listed(engine: str) -> None:
    known, data = profile(engine), profile(engine).data
    named = [*data["flags"]["aliases"].values(), *data["values"], *data["plan"]["not-planned"].split()]
    named += [word.lstrip("-") for words in data.get("settings", {}).values() for word in words.split()]
    absent = {flag for flag in named if flag not in known.known} - NOT_IN_THE_NEWEST
    assert not {flag for flag in absent if known.flag(flag).replaced_by is None}


@pytest.mark.parametrize("engine", ENGINES)
def test_settings_of_a_plan_are_spelled_and_rules_have_a_kind(engine: str) -> None:
    known = profile(engine)
    assert all(known.spelling(setting) for setting in known.planned)
    assert {rule["kind"] for rule in known.data.get("values", {}).values()} <= KINDS


def test_flags_of_vllm_have_a_history_that_agrees() -> None:
    known = profile("vllm")
    gone = known._lists["replaced"]
    assert not set(gone) & set(known.listed)
    for flag in gone:
        history = known.flag(flag)
        assert history.until is not None, flag
        assert history.since is None or history.since <= history.until, flag
    assert known.takes("swap-space", "0.17.1") is True
    assert known.takes("swap-space", "0.18.0") is False
    assert known.takes("swap-space") is False
    assert known.takes("attention-backend", "0.12.0") is False
    assert known.takes("bogus") is None
    assert known.feature("kv-pool-in-bytes") == known.flag("kv-cache-memory-bytes").since


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_releases_are_in_order(engine: str) -> None:
    data = profile(engine).data
    for table in data.get("by-release", {}).values():
        releases = [release_of(first) for first in table]
        assert releases == sorted(releases, reverse=True)
        assert releases[-1] == (0,)
    for feature in data.get("features", ()):
        span = profile(engine)._span(feature)
        assert span == sorted(set(span)), feature


@pytest.mark.parametrize(
    ("engine", "setting", "spelled", "new"),
    [
        ("vllm", "max-model-len", "--max-model-len", "--max-model-len"),
        ("sglang", "max-model-len", "--context-length", "--context-length"),
        ("sglang", "tensor-parallel-size", "--tp", "--tp-size"),
        ("llama.cpp", "max-model-len", "--ctx-size", "-c"),
        ("tgi", "quantization", "--quantize", "--quantize"),
        ("ollama", "max-num-seqs", "OLLAMA_NUM_PARALLEL", "OLLAMA_NUM_PARALLEL"),
        ("llama.cpp", "block-size", None, None),
        ("tgi", "VLLM_USE_V1", "VLLM_USE_V1", "VLLM_USE_V1"),
    ],
)
def test_our_settings_in_their_words(engine: str, setting: str, spelled: str | None, new: str | None) -> None:
    assert profile(engine).spelling(setting) == spelled
    assert profile(engine).spelling(setting, new=True) == new


@pytest.mark.parametrize(
    ("engine", "at", "model", "start"),
    [
        ("vllm", (), "m", "vllm serve m"),
        ("vllm", (0, 5, 2), "m", "python -m vllm.entrypoints.openai.api_server --model m"),
        ("vllm", (0, 5, 3), None, "vllm serve"),
        ("sglang", (), "m", "python -m sglang.launch_server --model-path m"),
        ("llama.cpp", (), None, "llama-server"),
        ("ollama", (), "m", "ollama serve"),
        ("another", (), "m", "vllm serve m"),
    ],
)
def test_what_a_command_begins_with(engine: str, at: tuple[int, ...], model: str | None, start: str) -> None:
    assert profile(engine).start(at, model=model) == start


def test_releases_as_they_are_written() -> None:
    assert release("v0.11.0+cu128") == release("0.11.0rc1") == (0, 11, 0)
    assert release("main") == ()
    assert spelled_release(release_of("0.5.3.post1")) == "0.5.3.post1"
    assert profile("vllm").has("latents-aligned", (0, 7, 2))
    assert not profile("vllm").has("latents-aligned", (0, 8, 0))


def test_a_plan_reads_no_list_of_flags_and_a_log_no_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    read: Any = module._read

    def reading(name: str) -> Any:
        seen.append(name)
        return read(name)

    monkeypatch.setattr(module, "_read", reading)
    fresh = module.Profile("sglang")
    assert fresh.since("architectures", "Qwen3ForCausalLM") == (0, 4, 5, 2)
    assert fresh.canonical("--tp-size") == "tensor-parallel-size"
    assert seen == ["sglang"]
    assert fresh.takes("tp") is True
    assert seen == ["sglang", "sglang_flags"]


def test_it_is_imported_without_the_rooms_that_use_it() -> None:
    code = "import sys, holdfast.engine_profiles.profile as p; p.profile('vllm').known; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "holdfast.planner" not in done.stdout
    assert "holdfast.doctor" not in done.stdout
