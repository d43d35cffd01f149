"""What a server says of an error reaches the terminal whole: our code, what was needed and what helps."""

import json

from holdfast.cli.chat_backends import _refusal
from holdfast.errors import EngineError, RequestError


def test_a_code_of_ours_is_kept() -> None:
    told = {"code": "HF310", "needed": "110 tokens", "found": "100 tokens", "fix": "shorten the prompt"}
    error = {"message": "too long", "code": "context_length_exceeded", "holdfast": told}
    found = _refusal(400, json.dumps({"error": error}).encode())
    assert isinstance(found, RequestError)
    assert (found.code, found.needed, found.found, found.fix) == tuple(told.values())
    assert "[HF310]" in str(found)


def test_other_servers_words_are_taken_as_they_are() -> None:
    found = _refusal(500, b'{"error": {"message": "broken", "code": "internal"}}')
    assert isinstance(found, EngineError)
    assert (found.message, found.code) == ("broken", "internal")
    for content in (b"", b"<html>", b"[]", b'{"error": "text"}', b'{"error": {"message": "x", "holdfast": 3}}'):
        assert _refusal(404, content).message
    assert "--api-key" in (_refusal(401, b"").fix or "")
