"""vLLM's structured_outputs_config: what all structured outputs have in common. Says which of its parts are honoured,
and why the others are not; what a grammar is, is `records`' and `text`'s."""

from __future__ import annotations

from typing import Any

from holdfast.config.setting import flag, table
from holdfast.errors import ConfigurationError

SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
_DONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "backend": (
        (None, "auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer"),
        "there is one structured output backend: leave it out",
    ),
    "disable_fallback": ((None, True, False), ""),
    "reasoning_parser": ((None, ""), "it is a separate setting: --reasoning-parser"),
    "reasoning_parser_plugin": ((None, ""), "code named in a setting is never run"),
    "enable_in_reasoning": ((None, False), "reasoning is not constrained; the grammar applies to the answer after it"),
}
"""Other parts: values that ask for what is done anyway, and what to say to any other."""


def form_settings(field: str, value: Any) -> dict[str, bool]:
    """The switches that are set."""
    found: dict[str, bool] = {}
    for name, part in table(field, value).items():
        if name in SWITCHES:
            found[name] = flag(f"{field}.{name}", part)
        elif name not in _DONE:
            raise ConfigurationError(
                f"{field} has no key {name!r}",
                needed=", ".join((*SWITCHES, *_DONE)),
                found=name,
                field="structured_outputs_config",
            )
        elif part not in _DONE[name][0]:
            raise ConfigurationError(
                f"{field}: {name} {part!r} cannot be honoured",
                found=str(part),
                fix=_DONE[name][1],
                field="structured_outputs_config",
            )
    return found
