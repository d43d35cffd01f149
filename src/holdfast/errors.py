"""Every way Holdfast says no, in one tree. Knows nothing of HTTP, tensors or terminals.

HoldfastError                     has a stable code, what was needed, what was there, a fix
├── ConfigurationError            (ValueError) a setting that cannot be honoured: refused at start
│   └── DoesNotFitError           the memory is not there for what was asked
├── ModelError                    the model's files cannot be used
│   ├── ModelNotFoundError        (FileNotFoundError) nothing at that name
│   ├── ModelAccessError          there, but not for us: gated, unauthorised, offline
│   ├── CheckpointError           torn, foreign, hostile or unsupported files
│   └── UnknownArchitectureError  a model family this engine does not have
├── RequestError                  (ValueError) one request is refused; nobody else notices
│   ├── ContextLengthError        prompt, or prompt plus output, beyond the context
│   ├── UnsupportedOptionError    an option that is not there yet, named
│   ├── UnknownModelError         the request names a model that is not served
│   ├── UnknownParameterError     (TypeError) SamplingParams has no parameter of that name
│   ├── GrammarError              what the answer must look like cannot be read, or cannot be held
│   ├── AdapterError              a LoRA adapter that cannot be used, or not with this model
│   └── OverloadedError           the waiting queue is full; try again later
└── EngineError                   the engine itself
    ├── EngineDiedError           its process ended while it held the request
    │   └── NoResourcesError      no file descriptor, process or memory is left to start it; tried again until there is
    ├── EngineHungError           its process stopped answering while it held the request, and was killed
    ├── StepMemoryError           no memory for the smallest step of this one request; others go on
    ├── NotFiniteError            what was computed for this one request are no numbers; others go on
    ├── SleepingError             it was put to sleep and takes nothing until it is woken
    └── DrainingError             the server is shutting down and takes nothing new
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def printable(text: str, *, keep: str = "") -> str:
    """`text` with every character that shows nothing, or steers a terminal, spelled out; `keep`: but for these."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else repr(one)[1:-1] for one in text)


DISK_FAILED = "HF443"
"""Layers could not be written to a disk, or not be read from it."""
RANK_WITHOUT_MEMORY = "HF447"
"""One of several found none for a step."""


class HoldfastError(Exception):
    """`code` is stable and documented; `fix` is a command or a change that helps, where one is known."""

    code = "HF000"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        needed: str | None = None,
        found: str | None = None,
        fix: str | None = None,
        field: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.needed = needed
        self.found = found
        self.fix = fix
        self.field = field
        self.request_id = request_id

    def __str__(self) -> str:
        first, *more = self.message.split("\n")
        if first.endswith(":"):  # Of a list.
            lines = [f"{self.message} [{self.code}]"]
        else:  # What follows may have another code.
            lines = [f"{first} [{self.code}]", *more]
        if self.needed is not None:
            lines.append(f"  needed: {self.needed}")
        if self.found is not None:
            lines.append(f"  found:  {self.found}")
        if self.fix is not None:
            lines.append(f"  fix:    {self.fix}")
        # Files and servers of strangers are quoted in here.
        return printable("\n".join(lines), keep="\n")


class ConfigurationError(HoldfastError, ValueError):
    code = "HF100"
    settings: tuple[str, ...] = ()
    """All that it is about, where it is about several."""
    unknown: tuple[str, ...] = ()
    """Words of a command line that nothing took."""
    meant: Mapping[str, str] = MappingProxyType({})
    """And of the flags among them the one that may be meant by each."""


class DoesNotFitError(ConfigurationError):
    code = "HF110"


class ModelError(HoldfastError):
    code = "HF200"


class ModelNotFoundError(ModelError, FileNotFoundError):
    code = "HF210"

    # FileNotFoundError brings a __str__ of its own (errno, strerror); ours must win.
    def __str__(self) -> str:
        return HoldfastError.__str__(self)


class ModelAccessError(ModelError):
    code = "HF220"


class CheckpointError(ModelError):
    code = "HF230"


class UnknownArchitectureError(ModelError):
    code = "HF240"


class RequestError(HoldfastError, ValueError):
    code = "HF300"


class ContextLengthError(RequestError):
    code = "HF310"


class UnsupportedOptionError(RequestError):
    code = "HF320"


class UnknownModelError(RequestError):
    code = "HF330"


class OverloadedError(RequestError):
    code = "HF340"


class UnknownParameterError(RequestError, TypeError):
    code = "HF350"


class AdapterError(RequestError):
    code = "HF370"


class GrammarError(RequestError):
    code = "HF360"


class EngineError(HoldfastError):
    code = "HF400"


class EngineDiedError(EngineError):
    code = "HF410"


class NoResourcesError(EngineDiedError):
    code = "HF411"


class EngineHungError(EngineError):
    code = "HF412"


class StepMemoryError(EngineError):
    code = "HF441"


class NotFiniteError(EngineError):
    code = "HF442"


class DrainingError(EngineError):
    code = "HF420"


class SleepingError(EngineError):
    code = "HF421"
