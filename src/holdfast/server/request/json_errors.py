"""What is wrong with a body that is not JSON, and where. Knows nothing of what a body should say."""

from __future__ import annotations

from holdfast.errors import RequestError


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
