"""vLLM's names that scripts make before they ask for anything. Nothing is done with them here."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` is given, and refuses with the reason."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


class RequestOutputKind(enum.Enum):
    """How answers come while they grow. `LLM` gives them whole, in vLLM and here."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
