"""Takes out of a text what nobody should read in a bug report: keys, tokens, prompts, homes. When in doubt, takes."""

from __future__ import annotations

import re
from collections.abc import Callable

GONE = "[REDACTED]"
_SECRET_NAME = (
    r"[\w.-]*(?:api[_-]?keys?|token|secret|passw(?:or)?d|credential|authorization|access[_-]?key|private[_-]?key)"
)
_TOKEN_COUNTS = re.compile(
    r"(?i)(?:max|min|num|batched|total|new|prompt|completion|input|output|eos|bos|pad|cached)[\w-]*tokens?\Z"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {GONE}"),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), GONE),
    (re.compile(r"\b(?:sk|pk|rk|ghp|gho|ghs|ghu|glpat|xox[abprs]|nvapi|gsk)[-_][A-Za-z0-9_-]{8,}"), GONE),
    (re.compile(r"\bgithub_pat_\w{8,}"), GONE),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), GONE),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"), GONE),
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|$)", re.DOTALL), GONE),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"), GONE),
    (re.compile(r"(?i)([?&](?:key|token|sig|signature|code|password)=)[^&\s'\"]+"), rf"\1{GONE}"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), GONE),
    (re.compile(r"(?:/home|/Users|/var/home|/export/home|/mnt/home)/[^/\s'\":,)]+"), "~"),
    (re.compile(r"(?<![\w/])/root(?=/|\b)"), "~"),
    (re.compile(r"(?i)[A-Z]:\\+Users\\+[^\\\s'\"]+"), "~"),
)  # fmt: skip
_FLAGGED = re.compile(rf"(?i)(--{_SECRET_NAME})(=|\s+)(?!-)('[^']*'|\"[^\"]*\"|\S+)")
_ASSIGNED = re.compile(rf"(?i)(['\"]?\b{_SECRET_NAME}['\"]?\s*[=:]\s*)(\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[^\s,;)}}\]]+)")
_PROMPTS = (
    re.compile(r"((?:Received|Added) request \S+:?).*", re.DOTALL),
    re.compile(r"(?i)(['\"]?\b(?:prompt|messages|content|input_text|inputs|query|generated_text|outputs?)['\"]?\s*[:=]\s*)"
               r"(\[.*|\{.*|'.*|\".*|b'.*)", re.DOTALL),
    re.compile(r"(?i)(prompt_token_ids\s*[:=]\s*)(\[[^\]]*\]?)"),
)  # fmt: skip


def redacted(text: str) -> str:
    """One line, or several; what is taken leaves a mark."""
    for pattern in _PROMPTS:
        text = pattern.sub(rf"\1 {GONE}", text)
    text = _FLAGGED.sub(_kept_counts(lambda found: f"{found[1]}{found[2]}{GONE}"), text)
    text = _ASSIGNED.sub(_kept_counts(lambda found: f"{found[1]}{GONE}"), text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _kept_counts(replace: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    """max_tokens=16 is a number of tokens, and no token; None is no secret."""

    def replaced(found: re.Match[str]) -> str:
        name = re.sub(r"\W+$", "", found[1].strip("-'\" "))
        value = found[found.re.groups].strip("'\" ")
        harmless = value in ("None", "null", "True", "False", "true", "false", "")
        if harmless or (_TOKEN_COUNTS.search(name) and re.fullmatch(r"[\d.,]+", value)):
            return found[0]
        return replace(found)

    return replaced
