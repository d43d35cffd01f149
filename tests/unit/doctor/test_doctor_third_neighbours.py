"""Messages that were taken for their neighbours, of the third set that somebody else judged."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from holdfast.doctor import diagnose_lines
from holdfast.doctor.findings import Diagnosis

WAITED = "(EngineCore pid=7) INFO 08-13 11:3{}:44 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 seconds."
STARTED = "(APIServer pid=6) INFO:     Application startup complete."
REFUSED = "requests.exceptions.ConnectionError: HTTPConnectionPool(host='{}', port=8001): Max retries exceeded with url: / (Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))"
DEGRADED = "load: GENERATION QUALITY WILL BE DEGRADED!"
LISTENS = "main: server is listening on http://127.0.0.1:8080 - starting the main loop"
NCCL = "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"


def _read(*lines: str) -> Diagnosis:
    return diagnose_lines(list(lines), "log")


def _said(*lines: str) -> str:
    first = _read(*lines).findings[0]
    return f"{first.what} {'' if first.fix is None else f'{first.fix.command} {first.fix.changes} {first.fix.why}'}"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("model 'undefined' not found, try pulling it first",), "no model is chosen"),
        (("model 'llama9' not found, try pulling it first",), "Ollama has no model called llama9"),
        ((REFUSED.format("0.0.0.0"),), "an address to listen at"),
        ((REFUSED.format("10.0.0.9"),), "before the server had finished loading"),
        (('<p id="sysmsg">The system returned: <i>(111) Connection refused</i></p>',), "an HTTP proxy"),
        (
            (
                "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
                "You need to have sentencepiece installed to convert a slow tokenizer to a fast one.",
            ),
            "pip install sentencepiece",
        ),
        (
            ("ValueError: Couldn't instantiate the backend tokenizer from one of: ",),
            "its file is not where the model is",
        ),
        (("Error: invalid file magic",), "a newer Ollama"),
        ((NCCL,), "NCCL_DEBUG"),
        (("NCCL WARN Cuda failure 'peer access is not supported'", NCCL), "cannot reach each other"),
    ],
)
def test_a_message_is_told_from_its_neighbour(lines: tuple[str, ...], said: str) -> None:
    assert said in _said(*lines)


def test_ranks_that_waited_before_the_server_was_up_did_not_hang() -> None:
    waits = [WAITED.format(minute) for minute in range(5)]
    assert _read(*waits, STARTED).findings == []
    assert [one.cause for one in _read(STARTED, *waits).findings] == ["timeout_or_hang"]


def test_a_server_that_answers_with_an_old_file_is_well() -> None:
    read = _read(DEGRADED, LISTENS)
    assert (read.healthy, [one.cause for one in read.findings]) == (True, ["tokenizer_mismatch"])


def test_an_attention_that_no_other_could_take_the_place_of_is_not_called_slow() -> None:
    said = "(EngineCore pid=65) INFO 03-02 01:47:29 [cuda.py:372] Using {} backend on V1 engine."
    assert "slow_attention_backend" not in [one.cause for one in _read(said.format("FlexAttention"), STARTED).findings]
    assert "slow_attention_backend" in [one.cause for one in _read(said.format("XFormers"), STARTED).findings]


def test_a_part_of_a_download_that_is_tried_again_is_no_damaged_file() -> None:
    tried = 'time=2025-11-13T06:23:17.738Z level=INFO source=download.go:295 msg="ff1d part 9 attempt 0 failed: unexpected EOF, retrying in 1s"'
    assert "corrupt_download" not in [one.cause for one in _read(tried).findings]
    assert "corrupt_download" in [one.cause for one in _read("safetensors: unexpected EOF").findings]
