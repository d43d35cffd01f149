"""A log that ends in an ordered shutdown: nothing failed, and it does not pass for that of a server that serves."""

from __future__ import annotations

import pytest

from holdfast.doctor.diagnosis.diagnose import diagnose_lines

SERVED = (
    "INFO 06-01 10:00:00 [api_server.py:1289] vLLM API server version 0.9.0\n"
    "INFO:     Started server process [12]\nINFO:     Application startup complete.\n"
)
ENDED = (
    "INFO:     Shutting down\nINFO:     Waiting for application shutdown.\n"
    "INFO:     Application shutdown complete.\nINFO:     Finished server process [12]\n"
)


@pytest.mark.parametrize(("text", "ended"), [(SERVED, False), (SERVED + ENDED, True), (SERVED + ENDED + SERVED, False)])
def test_a_server_that_was_stopped_in_order_is_said_not_to_serve(text: str, ended: bool) -> None:
    found = diagnose_lines(text.splitlines(), "log")
    assert found.healthy
    assert ["orderly shutdown" in one for one in found.seen] == ([True] if ended else [])
