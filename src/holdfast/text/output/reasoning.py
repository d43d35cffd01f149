"""What a model thinks before it answers, told apart from the answer while it grows. Owns the marks of the families that
do so, and whether a prompt has opened them already. Knows nothing of calls.

    prompt ...<think>\\n | thoughts </think> answer          the template opened it
    prompt ...          | <think> thoughts </think> answer  the model opens it, or does not think
    prompt ...</think>  | answer                            the template closed it: enable_thinking is false
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from holdfast.text.output.partial_match import overlap

State = Literal["open", "over", "assumed", "undecided"]
"""Of thoughts, where an answer begins: assumed and undecided until the answer itself tells."""
MAX_TAIL_CHARS = 256
MAX_LEADING_SPACES = 64
"""More white space than this is not waited through for a mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A family's marks."""

    opening: str = "<think>"
    closing: str = "</think>"
    always: bool = False
    """Whether an answer begins with thoughts also where neither prompt nor answer opens them."""

    def state_behind(self, prompt: str) -> State:
        end = prompt[-MAX_TAIL_CHARS:].rstrip()
        if end.endswith(self.opening):
            return "open"
        if end.endswith(self.closing):
            return "over"
        return "assumed" if self.always else "undecided"

    def state_within(self, prompt: str) -> State:
        """Of a prompt that ends in the middle of an answer."""
        return "open" if prompt.rfind(self.opening) > prompt.rfind(self.closing) else "over"


_THINK, _THINK_ALWAYS = ReasoningFormat(), ReasoningFormat(always=True)
FAMILIES: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "deepseek_r1": _THINK_ALWAYS,
        "qwen3": _THINK,
        "deepseek_v3": _THINK,
        "ernie45": _THINK,
        "glm45": _THINK,
        "holo2": _THINK,
        "kimi_k2": _THINK,
        "minimax_m2": _THINK_ALWAYS,
        "olmo3": _THINK,
        "step3": _THINK_ALWAYS,
        "seed_oss": ReasoningFormat(opening="<seed:think>", closing="</seed:think>"),
        "granite": ReasoningFormat(opening="Here is my thought process:", closing="Here is my response:"),
        "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]"),
    }
)
"""By vLLM's names."""


def thinking_of(template: str | None) -> str | None:
    """The family whose marks a chat template writes; None: it has none."""
    if template is None:
        return None
    for name in ("seed_oss", "mistral", "qwen3"):
        if FAMILIES[name].closing in template:
            return name
    return None


class ReasoningReader:
    """One answer's; not thread-safe. The same text gives the same two texts however it was cut."""

    def __init__(self, family: ReasoningFormat, state: State) -> None:
        self._family = family
        self._over = state == "over"
        self._undecided = state in ("undecided", "assumed")
        self._thinks = state in ("open", "assumed")
        """Where undecided: unless the answer begins otherwise."""
        self._waiting = ""
        """White space before anything else, or what may begin a mark."""

    def feed(self, text: str) -> tuple[str, str]:
        """What of it is thought, and what is answer: the one before the other."""
        if self._over:
            return "", text
        text, self._waiting = self._waiting + text, ""
        if self._undecided:
            start, opening = text.lstrip(), self._family.opening
            near = len(text) - len(start) <= MAX_LEADING_SPACES
            if near and len(start) < len(opening) and opening.startswith(start):
                self._waiting = text
                return "", ""
            self._undecided = False
            if near and start.startswith(opening):
                self._thinks, text = True, start[len(opening) :]
            elif not self._thinks:
                self._over = True
                return "", text
        return self._split(text)

    def finish(self) -> tuple[str, str]:
        waiting, self._waiting = self._waiting, ""
        return (waiting, "") if self._thinks and not self._over else ("", waiting)

    def _split(self, text: str) -> tuple[str, str]:
        thought, closing, answer = text.partition(self._family.closing)
        if closing:
            self._over = True
            return thought, answer
        held = overlap(text, self._family.closing)
        shown = len(text) - held
        self._waiting = text[shown:]
        return text[:shown], ""
