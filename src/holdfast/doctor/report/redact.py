"""Takes out of a text what nobody should read in a bug report: keys, tokens, prompts, mail, homes. In doubt it takes.

    names that hold secrets    secret_names.py: the value behind them goes, quoted, listed, or several words of a flag
    shapes of secrets          known beginnings (hf_, sk-, AKIA ...), JSON web tokens, PEM, long random words
    words of users             the rest of the line behind prompt, messages, content ..., and the lines that follow it
                               up to one that a program has stamped

Every line takes time in proportion to its length. Knows no archive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.doctor.logs.line import read_line
from holdfast.doctor.report.secret_names import GONE, is_secret, without_named_secrets

_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b(bearer|basic|digest|negotiate)\s+(?!auth|\[)[\w.~+/=-]{6,}"), rf"\1 {GONE}"),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), GONE),
    (re.compile(r"\b(?:sk|pk|rk|gh[porsu]|glpat|xox[abeprs]|nvapi|gsk|dop_v1|dckr_pat|npm|pypi|r8|tvly|pplx)"
                r"[-_][A-Za-z0-9_-]{8,}"), GONE),
    (re.compile(r"\bgithub_pat_\w{8,}"), GONE),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"), GONE),
    (re.compile(r"\bAIza[\w-]{30,}"), GONE),
    (re.compile(r"\bya29\.[\w-]{10,}"), GONE),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"), GONE),
    (re.compile(r"(?<![\w+])(?=[a-z0-9+]{0,40}[A-Z])(?=[A-Z0-9+]{0,40}[a-z])(?=[A-Za-z+]{0,40}\d)"
                r"[A-Za-z0-9+]{40,}=*"), GONE),
    (re.compile(r"\bdata:[\w/+.-]+;base64,[\w+/=-]*"), f"data:{GONE}"),
    (re.compile(r"(?<=://)[^/\s'\"]+(?=@)"), GONE),
    (re.compile(r"(?<=[\w/])\?[\w.~%+-]+=[^\s'\"]*"), f"?{GONE}"),
)  # fmt: skip
_PLACES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), GONE),
    (re.compile(r"(?<![\w.~-])(?:/[\w.-]+){0,6}/(?:home|homes|Users|users)/(?!\[)[^/\s'\":,;)\]]+"), "~"),
    (re.compile(r"(?<![\w/])/root(?=/|\b)"), "~"),
    # A name may have spaces: it ends where the next folder begins.
    (re.compile(r"(?i)\b[A-Z]:[\\/]+Users[\\/]+(?:[^\\/'\":,;|<>]{1,60}(?=[\\/])|[^\\/\s'\":,;|<>]+)"), "~"),
    (re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )[\w.-]+(?= )"), r"\1host"),
    (re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?=:\d)"), "IP"),
    (re.compile(r"(?<=ip=)(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}"), "IP"),
)
_WORDS_OF_USERS = re.compile(
    r"(?i)(?<![\w.-])(?!limit_mm)(?!\w{0,20}per_prompt)"
    r"((?:\w{1,24}[_-])?(?:prompts?|messages|content|contents|completion|input_text|output_text|generated_text)"
    r"|texts?|inputs?|outputs?|out|query|queries|question|answer|documents?|passages?|instructions?|suffix"
    r"|transcript|transcription|arguments|input_value|refusal|delta|response_text|utterance|body)"
    r"(\\*['\"]?\s{0,4}[:=]\s{0,4})(?=b?\\*['\"]|[\[{(]|\w+\()"
)
"""A name, and behind it something in quotes or brackets."""
_SPOKEN = re.compile(
    r"(?i)(?<![\w.-])((?:(?:input|user|system|full|raw|final|formatted|the|chat|your)[ _-])?(?:prompt|completion)"
    r"|(?:user|assistant|system|generated)[ _-](?:message|text|input|query|response)|(?:user|question)(?=: ))"
    r"(\s{0,4}[:=]\s{1,4}|[:=])(?=\S)(?!-?\d[\d.,]*(?:\s|$|\)|,)|None\b|True\b|False\b|null\b|\[REDACTED)"
)
"""The same without quotes: what follows up to the end of the line."""
_REQUEST = re.compile(r"((?:Received|Added|Generated|Finished) (?:request|response) [\w.-]+:?)(.*)", re.DOTALL)
_IDS = re.compile(r"(?i)((?:token|input|output)_ids\\*['\"]?\s{0,4}[:=]\s{0,4})\[[^\]]*\]?")
_NEXT_TOKEN = re.compile(r"((?:next|sampled) token:? +\d+ )'.*")
_SPECIAL = re.compile(
    r"<\|(?:im_start|start_header_id|user|assistant|system|begin_of_text)[|_\w]*\|>|\[INST\]|<start_of_turn>"
)
"""Where a chat template's own marks stand in a line, a conversation does."""
_OPENS_PEM, _CLOSES_PEM = "-----BEGIN ", "-----END "
_OWN_WORDS = re.compile(
    r"(?:Traceback \(most recent|The above exception|During handling of|(?:[\w.]{1,80})?(?:Error|Exception|Interrupt): "
    r"|(?:srv|slot|main|llama_\w+|ggml_\w+|load_\w+|common_\w+|print_info|system_info|que)\b ?[^:]{0,40}: "
    r"|[$+#] |Killed|Aborted|Segmentation fault)"
)
"""With these a program begins a line of its own, without a stamp."""
_SHORTEST_VALUE = 4
"""Characters: a word of fewer is found everywhere, and is no secret."""
_NAMED = re.compile(r"^[\s-]*\"?name\"?: {1,4}\"?([\w.-]+)\"?,?\s*$")
_VALUED = re.compile(r"^(\s*\"?value\"?: {1,4})(.*)$")


class Redactor:
    """The lines of one text, in their order: what spans several is taken from all of them."""

    def __init__(self, *, in_doubt: bool = False) -> None:
        """`in_doubt`: the text begins in the midst of another, and its first line may be a user's."""
        self._words = in_doubt
        """The lines so far end within words of a user."""
        self._stamped = in_doubt
        """And had begun in a line with a level: the next line that has one is none of theirs."""
        self._pem = False
        self._named = False
        """The line before was the name of a variable that holds a secret."""

    def line(self, text: str) -> str:
        if self._pem:
            self._pem = _CLOSES_PEM not in text
            return GONE
        if self._words:
            if not self._begins_another(text):
                return GONE
            self._words = False
        text = self._variable(text)
        at = text.find(_OPENS_PEM)
        if at >= 0:
            ends = text.find(_CLOSES_PEM, at)
            self._pem = ends < 0
            text = text[:at] + GONE
        return _without((*_SHAPES, *_PLACES), without_named_secrets(self._without_words(text)))

    def _begins_another(self, text: str) -> bool:
        line = read_line(text, 0)
        if line.level or line.style or _OWN_WORDS.match(line.text):
            return True
        return not self._stamped and line.text != text.rstrip()

    def _without_words(self, text: str) -> str:
        requested = _REQUEST.search(text)
        if requested is not None:
            self._open(text, requested.end(1))
            return f"{text[: requested.end(1)]} {GONE}"
        quoted, spoken, special = _WORDS_OF_USERS.search(text), _SPOKEN.search(text), _SPECIAL.search(text)
        ends = [(found.end(), found) for found in (quoted, spoken) if found is not None]
        if special is not None:
            ends.append((special.start(), special))
        text = _NEXT_TOKEN.sub(rf"\1{GONE}", text)
        if not ends:
            return _IDS.sub(rf"\1[{GONE}]", text)
        at, found = min(ends, key=lambda end: end[0])
        self._open(text, at, unquoted=found is not quoted)
        return f"{text[:at]}{GONE}"

    def _open(self, text: str, at: int, *, unquoted: bool = False) -> None:
        """Whether what begins there goes on in the next line. Without quotes nothing says where it ends."""
        rest = text[at:].rstrip()
        quotes = [quote for quote in "'\"" if quote in rest]
        closed = any(_count(rest, quote) % 2 == 0 for quote in quotes) if quotes else rest[-1:] in ("]", "}", ")")
        self._words = unquoted or not closed
        self._stamped = bool(read_line(text, 0).level)

    def _variable(self, text: str) -> str:
        """Two lines of a manifest: `name: HF_TOKEN`, and its `value:`."""
        named, self._named = self._named, False
        if named and (value := _VALUED.match(text)) is not None:
            return f"{value[1]}{GONE}"
        found = _NAMED.match(text)
        self._named = found is not None and is_secret(found[1])
        return text


def redacted(text: str) -> str:
    """One line, or several; what is taken leaves a mark."""
    redactor = Redactor()
    return "\n".join(redactor.line(line) for line in text.split("\n"))


def without_secrets(text: str, *, named: bool = True) -> str:
    """Keys and tokens only: for what is shown to who owns the log, and may be pasted elsewhere.

    `named`: also what follows the name of a secret. In a sentence of our own that would be words of it.
    """
    return _without(_SHAPES, without_named_secrets(text) if named else text)


def without_values(text: str, values: Iterable[str]) -> str:
    """Secrets that are known, and shapes of others: for sentences of our own, in which the name of a flag is followed
    by words and not by a key."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_VALUE:
            text = re.sub(rf"(?<![\w-]){re.escape(value)}(?![\w-])", GONE, text)
    return without_secrets(text, named=False)


def _without(shapes: Iterable[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, replacement in shapes:
        text = pattern.sub(replacement, text)
    return text


def _count(text: str, quote: str) -> int:
    """Without those that a backslash stands before, and those of a word such as it's."""
    return len(re.findall(rf"(?<![\\\w]){quote}|(?<!\\){quote}(?!\w)", text))
