"""Values behind names that say that they are secret: variables, flags, headers, fields. Knows no shape of a key.

NAME=value   NAME: value   'name': ['a', 'b']   --name a b   (b'name', b'value')   the password is value
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache

GONE = "[REDACTED]"
MISSPELT = 0.83
"""How like `apikey` a name must be to be meant as it: two letters of it exchanged."""
_KEY = "apikey"

_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?<!\$\{)(-{0,2}[A-Za-z_][\w.-]{1,120})(\\*['\"]?\)?\s{0,8})(=>|[=:]|,(?=\s{0,4}b?['\"]))(\s{0,8})"
)
_FLAG = re.compile(r"(?<![\w.-])(--?[A-Za-z][\w.-]{2,120})(\s{1,8})(?=[^\s-])")
_SAID = re.compile(
    r"(?i)\b((?:password|passphrase|passwd|passcode)(?:\s{1,4}(?:is|was))?"
    r"|(?:api|access|secret)[ _-](?:key|token)\s{1,4}(?:is|was))"
    r"\s{1,4}(?!is\b|was\b|required|not\b|for\b|to\b|and\b|or\b|file|\[)[^\s,;]+"
)
_VARIABLE = re.compile(
    r"(?i)(name\\*['\"]?\s{0,4}[:=]\s{0,4}\\*['\"]?)([\w.-]+)(\\*['\"]?\s{0,4},\s{0,4}\\*['\"]?value\\*['\"]?\s{0,4}[:=]\s{0,4})"
)
_ALWAYS = re.compile(
    r"api_?keys?|secret|passw(?:or)?d|passphrase|passwd|credential|authorization|cookie|access_?key|account_?key"
    r"|private_?key|signing_?key|encryption_?key|shared_?key|bearer|jwt|session_?(?:id|key|token)|(?:^|_)pwd(?:_|$)"
    r"|(?:^|_)dsn(?:_|$)|webhook|csrf|xsrf|otp(?:_|$)"
)
_PARTS = re.compile(r"(?:^|_)(?:tokens?|keys?|auth|pat)(?:_|$)")
_ONLY_ASSIGNED = re.compile(r"_pass(?:_|$)|^-*pass$|signature|(?:^|_)sig(?:_|$)")
_HARMLESS_NAMES = re.compile(
    r"tokenizer|(?:max|min|num|batched|total|new|prompt|completion|input|output|eos|bos|pad|cached|special|stop|image"
    r"|unk|sep|cls|mask|reasoning|first|generated|avg|lookahead|draft|speculative)\w*_tokens?(?:_|$)"
    r"|(?:^|_)tokens?_(?:ids?|per|count|usage|budget|len|length|throughput|type)|tokens?_s$|key_(?:value|length|size|cache|error|dim)|keyfile|key_file|_file$"
    r"|^-*keys$|public_key|authors?$|password_file"
)
_HEADERS = re.compile(r"authorization|cookie")
_NOTHING = frozenset(("None", "null", "True", "False", "true", "false", "", "(set)", GONE, "not", "EMPTY"))
_FILLED_IN = re.compile(r"\$[A-Z_][A-Z0-9_]*|\$\{[A-Za-z_]\w*(?::?\?[^}]*|:?-)?\}|\$\([^)]*\)")
"""By a shell; with a value of its own for where there is none it would be one."""
_SCHEMES = frozenset(("bearer", "basic", "token", "apikey", "api-key", "digest", "negotiate", "key"))
_NUMBER = re.compile(r"[\d.,]+\Z")
_PLAIN = re.compile(r"[^\s,;)}\]'\"&]+")
_QUOTE = re.compile(r"\\*['\"]")
_BETWEEN = re.compile(r"\s{1,8}(?=\S)")
_SECOND_WORD = re.compile(r"\s{1,4}[^\s,;)}\]'\"&]+")
_OPEN, _CLOSE = "[{(", "]})"


def without_named_secrets(text: str) -> str:
    """In time that grows with the length of the text: what was looked at is not looked at again."""
    pieces: list[str] = []
    at = 0
    following = [(look, look(text, 0)) for look in (_assigned, _flagged, _variable)]
    while True:
        # One that was found within what is gone by now is looked for again.
        following = [(look, look(text, at) if span is not None and span[0] < at else span) for look, span in following]
        start, end = min((span for _, span in following if span is not None), default=(len(text), len(text)))
        pieces.append(text[at:start])
        if start == len(text):
            return _SAID.sub(rf"\1 {GONE}", "".join(pieces))
        pieces.append(GONE)
        at = end


@lru_cache(maxsize=4096)
def is_secret(name: str, *, assigned: bool = True) -> bool:
    """Whether a variable, flag or field of that name holds a secret. `assigned`: with =, not in a sentence."""
    plain = name.strip("-'\"").lower().replace("-", "_").replace(".", "_")
    if _ALWAYS.search(plain):
        return not plain.endswith(("_file", "_path"))
    if _HARMLESS_NAMES.search(plain):
        return False
    if is_misspelt_key(plain):
        return True
    return bool(_PARTS.search(plain)) or (assigned and bool(_ONLY_ASSIGNED.search(plain)))


def is_misspelt_key(name: str) -> bool:
    """api-kye, apkey: what stands behind it is a key all the same."""
    plain = name.replace("-", "").replace("_", "")
    if not plain.startswith("a") or abs(len(plain) - len(_KEY)) > 1:
        return False
    return difflib.SequenceMatcher(None, plain, _KEY).ratio() >= MISSPELT


def holds_secret(name: str, value: str) -> bool:
    """Whether the value of a variable or flag of that name is a secret: not where it is None, a file, a number of
    tokens, or what a shell fills in."""
    return is_secret(name) and not _harmless(name, value)


def _assigned(text: str, at: int) -> tuple[int, int] | None:
    for found in _ASSIGNMENT.finditer(text, at):
        name, separator = found[1], found[3]
        if separator == "," and "'" not in found[2] and '"' not in found[2]:
            continue
        if not is_secret(name, assigned=separator != ":" or bool(found[2].strip())):
            continue
        start = found.end()
        whole_line = bool(_HEADERS.search(name.lower())) and text[start : start + 1] not in (
            "'",
            '"',
            "b",
            "[",
            "\\",
            "(",
        )
        end = len(text) if whole_line else value_end(text, start)
        if end > start and not _harmless(name, text[start:end]):
            return start, end
    return None


def values_of_flags(text: str) -> frozenset[str]:
    """What stands behind flags that hold secrets: the first word, where it is none of a sentence. What follows it may
    be a model."""
    values: set[str] = set()
    for found in _FLAG.finditer(text):
        words = _words(text, found.end()) if is_secret(found[1]) else []
        if words and holds_secret(found[1], value := text[slice(*words[0])]):
            values |= {value.strip("'\"")} if len(words) == 1 or not value.isalpha() else set()
    return frozenset(values)


def _flagged(text: str, at: int) -> tuple[int, int] | None:
    """All words up to the next flag: a server may take several keys."""
    for found in _FLAG.finditer(text, at):
        if not is_secret(found[1]):
            continue
        words = _words(text, found.end())
        if any(not _harmless(found[1], text[start:end]) for start, end in words):
            return words[0][0], words[-1][1]
    return None


def _words(text: str, start: int) -> list[tuple[int, int]]:
    """From and to of each word that begins there or behind it, up to a flag or another command."""
    words: list[tuple[int, int]] = []
    while start < len(text) and text[start] != "-" and text[start] not in "|&;>":
        end = value_end(text, start)
        if end > start:
            words.append((start, end))
        following = _BETWEEN.match(text, end)
        if following is None:
            break
        start = following.end()
    return words


def _variable(text: str, at: int) -> tuple[int, int] | None:
    for found in _VARIABLE.finditer(text, at):
        if is_secret(found[2]):
            return found.end(), value_end(text, found.end())
    return None


def value_end(text: str, start: int) -> int:
    """Behind a value that begins there: in quotes, in brackets, or a word. What is not closed goes to the end."""
    at = start + (text[start : start + 1] in ("b", "r", "f", "u") and text[start + 1 : start + 2] in ("'", '"'))
    opened = _QUOTE.match(text, at)
    if opened is not None:
        closes = re.compile(r"(?<!\\)" + re.escape(opened[0])).search(text, opened.end())
        return len(text) if closes is None else closes.end()
    if text[at : at + 1] in _OPEN and at < len(text):
        return _bracket_end(text, at)
    word = _PLAIN.match(text, at)
    if word is None:
        return at
    if word[0].lower() in _SCHEMES:
        following = _SECOND_WORD.match(text, word.end())
        return word.end() if following is None else following.end()
    return word.end()


def _bracket_end(text: str, start: int) -> int:
    depth, quote = 0, ""
    for at in range(start, len(text)):
        letter = text[at]
        if quote:
            quote = "" if letter == quote and text[at - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if not depth:
                return at + 1
    return len(text)


def _harmless(name: str, value: str) -> bool:
    """A number of tokens is no token; None is no secret; nor is the name of a variable, or of a file of keys."""
    plain = value.strip("'\"\\ ")
    if plain in _NOTHING or _FILLED_IN.fullmatch(plain) or plain.startswith(("{{", "<", "%")):
        return True
    lowered = name.lower()
    if _NUMBER.fullmatch(plain) and not re.search(r"pass|secret|pwd|api", lowered):
        return True
    return plain.startswith(("/", "./", "~/")) and "token" not in lowered and "pass" not in lowered
