"""Messages next to a known one that mean something else: each is told apart from it, and no surer than the log allows."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Finding


def _first(*lines: str) -> Finding:
    return diagnose_lines(lines, "log").findings[0]


def test_a_port_that_the_system_forbids_is_not_told_as_taken() -> None:
    found = _first(
        "Error: listen tcp 127.0.0.1:11434: bind: An attempt was made to access a socket in a way forbidden by its access permissions."
    )
    assert "does not allow port 11434" in found.what
    assert found.fix is not None
    assert "excludedportrange" in (found.fix.command or "")
    assert found.confidence != "high"


def test_a_port_refused_in_another_language_is_not_told_for_sure() -> None:
    found = _first("Error: listen tcp 127.0.0.1:11434: bind: Une tentative d'accès à un socket de manière interdite.")
    assert "could not be opened" in found.what
    assert found.confidence != "high"


@pytest.mark.parametrize(
    "words", ["address already in use", "Only one usage of each socket address (protocol/network address/port)"]
)
def test_a_port_that_is_taken_stays_that(words: str) -> None:
    found = _first(f"Error: listen tcp 127.0.0.1:11434: bind: {words}")
    assert found.what == "Port 11434 is taken by another process."
    assert found.confidence == "high"


def test_weights_of_another_format_are_not_told_as_a_torn_gguf() -> None:
    found = _first(
        "gguf_init_from_file: invalid magic number 00029880",
        r"error loading model: llama_model_loader: failed to load model from D:\model.safetensors",
    )
    assert "is no GGUF" in found.what
    assert found.fix is not None
    assert "convert_hf_to_gguf" in found.fix.why


def test_a_gguf_that_is_a_pointer_is_fetched_again() -> None:
    found = _first(
        "gguf_init_from_file: invalid magic number 73726576",
        "error loading model: llama_model_loader: failed to load model from models/small.Q2_K.gguf",
    )
    assert found.cause == "corrupt_download"


def test_a_model_of_ones_own_that_the_registry_lacks_is_not_told_as_misspelt_for_sure() -> None:
    found = _first(
        "ollama create my-dog -f ./Modelfile",
        "ollama run my-dog",
        "pulling manifest",
        "Error: pull model manifest: file does not exist",
    )
    assert found.cause == "gated_or_missing_model"
    assert found.confidence == "medium"
    assert found.fix is not None
    assert "FROM" in found.fix.why
