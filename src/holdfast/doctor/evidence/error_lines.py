"""What an error looks like in a log of Python, C++ or Go: tracebacks, their frames and the lines around them.

Shapes alone; what an error means is in the rules.
"""

from __future__ import annotations

import re

FRAME = re.compile(r'^(?:.{0,120}?\|)?\s*(?:File "|File /|File <|-+> \d|\(?[\w/.-]+\.py:\d+\)?,? in\b)')
HEADER = "Traceback (most recent call last)"
ERROR = re.compile(
    r"^(?:[\w.]+\.)?(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit)|Exception|AssertionError|StopIteration)(?::|$)"
    r"|^(?:[a-z_]\w*\.)+(?:exc|exceptions|errors?)\.[A-Z]\w*(?::|$)"
    r"|(?:Segmentation fault|core dumped|Aborted|Bus error|SIGSEGV|SIGABRT|panicked at|terminate called"
    r"|Assertion [`'\"].{1,200} failed|llama runner process has terminated: signal)"
    r"|\b(?:ROCm|HIP|CUDA) error\b|HSA_STATUS_ERROR|error loading model: \S"
)
DIED = re.compile(
    r"Segmentation fault|core dumped|Aborted|SIGSEGV|SIGABRT|terminate called|\b(?:CUDA|HIP|ROCm) error\b"
)
OF_REQUEST = re.compile(
    r"HTTPException|CancelledError|ClientDisconnect|ValidationError|ExceptionGroup|Disconnect|Timeout"
)
"""Errors of one request or of its client: the server goes on."""
MILD = ("DEBUG", "INFO", "WARNING", "WARN")
PROSE = re.compile(
    r"^\W*(?:I|I'm|I've|We|When|While|After|If|Hi|Hello|My|Since|Because|Also|Then|Now|Even|Does|Can|How|Why|What|Please"
    r"|Although|However|Sometimes|Currently|Today|Is|Are)\b(?!:)"
)
"""How people begin a sentence, and no program a line."""
MARKERS = re.compile(r"^\s*[\^~]+\s*$")
CHAINED = re.compile(r"(?:The above exception was the direct cause|During handling of the above exception)")


def is_drawn(text: str) -> bool:
    """Nothing, or what stands around the error in a traceback: code, markers below it, the words between two."""
    return not text.strip() or text.startswith("    ") or bool(MARKERS.match(text) or CHAINED.search(text))
