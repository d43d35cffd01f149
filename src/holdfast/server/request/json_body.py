"""A body as a JSON object, and of one that is none what is wrong and where. Knows nothing of what bodies should say."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import RequestError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""PowerShell and editors of Windows begin a file with it; RFC 8259 lets a reader pass over it."""


def decode_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw.removeprefix(BYTE_ORDER_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(raw, error) from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", needed="object", found=type(body).__name__)
    return body


def not_json(raw: bytes, error: Exception) -> RequestError:
    """With the place where it breaks off. msgspec names it, but for ends, and for bytes that are no text."""
    fix = "send valid JSON in UTF-8, written by a JSON library"
    said = str(error)
    if not raw.strip():
        said, fix = "it is empty", 'send the request as a JSON object: {"model": ...}'
    elif isinstance(error, RecursionError):
        said, fix = "it is nested too deeply", "send objects and lists that are less deeply nested"
    elif isinstance(error, UnicodeDecodeError):
        try:
            raw.decode()
        except UnicodeDecodeError as whole:  # The other counts from the beginning of a string.
            said = f"it is not UTF-8 (byte {whole.start})"
    elif "truncated" in said:
        said = f"it ends before the object is closed (byte {len(raw)})"
        fix = "close open quotes and brackets, and check that the whole body was sent"
    return RequestError(f"the body is not valid JSON: {said}", fix=fix)
