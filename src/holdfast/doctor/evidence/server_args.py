"""The settings a log tells: its dumps of arguments, the engine's own configuration line, a command in its text.

    a command          what was run
    dump of arguments  what was given, all of it: rebuild_command.py writes the command again
    configuration      what came of it, and of the model: only what can be nothing but given is written again

Reads how engines print what they were given; judges none of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.evidence.argument_dumps import Call, arguments
from holdfast.doctor.evidence.rebuild_command import was_given, written
from holdfast.engine_profiles.profile import MODEL_FLAGS, engines, profile

_DUMPS = (
    (None, re.compile(r"non-default args: \{(.*)")),
    ("vllm", re.compile(r"args: (?:vLLM )?Namespace\((.*)")),
    ("sglang", re.compile(r"(?:server_args\s*=\s*|^)ServerArgs\((.*)")),
    ("tgi", re.compile(r"Args \{ (.*)")),
)
"""Of all arguments of an engine; of None only those that were set, of the engine that the log is of."""
_CONFIGURATION = re.compile(
    r"(?:Initializing|Dumping input data for) (?:(?:an?|the) )?.*?LLM engine.*? with config: (.*)"
)
_VERSION = re.compile(r"(?:vLLM API server version |LLM engine \(v)(\d+\.\d+(?:\.\d+)?)")
_RUST = "Args {"
_RUST_LINE = re.compile(r"[}\])]|\s+(?:\w+: \S|[\"\w./:-]+,?$|[)\]}],?$)")
_NOTHING_INSIDE = re.compile(r"Some\(\s*\n(?=\s{4}\w+:|\})")
_COMMAND = re.compile(
    "|".join(how["in-log"] for how in engines().values())
    + r"|(?:docker|podman) run .*(?:vllm|sglang|text-generation|llama|ollama|holdfast)"
)
_NO_COMMAND = re.compile(
    r"^\s*(?:File|-+>|\d+ |run: )|\^\^\^|site-packages|dist-packages|\busage:|\[options\]|\[model_tag\]"
)
_LLAMA = (
    ("model", re.compile(r"loading model '([^']+)'")),
    ("ctx-size", re.compile(r"(?:llama_context|llama_new_context_with_model): n_ctx +?= (\d+)")),
    ("parallel", re.compile(r"(?:n_seq_max +?=|n_slots =) (\d+)")),
    ("n-gpu-layers", re.compile(r"offloaded ([1-9]\d*)/\d+ layers to GPU")),
    ("cache-type-k", re.compile(r"type_k = '(?!f16)(\w+)'")),
    ("cache-type-v", re.compile(r"type_v = '(?!f16)(\w+)'")),
    ("host", re.compile(r"listening[,:]? .*?hostname: (?!127\.0\.0\.1)(\S+?),")),
    ("port", re.compile(r"hostname: \S+, port: (?!8080)(\d+)")),
)
_RANK = re.compile(r"\bTP(\d+)\b")
_WRITTEN_FROM_CONFIGURATION = (
    "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "trust-remote-code", "enforce-eager",
    "kv-cache-dtype", "served-model-name", "tokenizer", "revision", "download-dir", "dtype", "quantization",
    "max-model-len",
)  # fmt: skip
_MADE_WHILE_LOADING = ("bitsandbytes", "fp8")
"""Methods that somebody asks for; others are read from the checkpoint."""
_LONGEST = 20_000
"""Characters of a command or a dump that goes over several lines."""


_parsed = lru_cache(maxsize=4)(parse_command)
"""A command that is written again is asked for with every fix."""


class ServerArgs:
    """Gathered as the log is read: what was set, and the command where one was seen."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        """What was told, as text: for sums and for words."""
        self.command: ServerCommand | None = None
        self.listing = False
        """A dump or a command goes on in the next line, whatever that looks like."""
        self.version: str | None = None
        self._given: dict[str, Any] = {}
        self._derived: dict[str, Any] = {}
        self._whole = False
        """What was given was told as such; a configuration beside it adds nothing to the command."""
        self._begun, self._rust, self._torn = "", False, False

    def read(self, text: str, engine: str | None) -> bool:
        """Whether the line told any."""
        if self.listing and self._goes_on(text):
            return True
        version = _VERSION.search(text)
        if version is not None:
            self.version = version[1]
        if text.rstrip().endswith(_RUST):
            self.listing, self._rust, self._begun = True, True, ""
            return True
        if self._dump(text, engine or "vllm"):
            return True
        if _COMMAND.search(text) is not None and _NO_COMMAND.search(text) is None:
            if text.rstrip().endswith("\\"):
                self.listing, self._rust, self._begun = True, False, text
                return True
            return self._told_command(text)
        return self._llama(text, engine)

    def _goes_on(self, text: str) -> bool:
        """Whether the line belongs to what was begun; where that has ended, it is taken as it stands."""
        inside = not self._rust or _RUST_LINE.match(text) is not None
        ended = (not inside or text.startswith("}")) if self._rust else not text.rstrip().endswith("\\")
        self._begun += f"\n{text}" if inside else ""
        self.listing = not ended and len(self._begun) <= _LONGEST
        if ended and len(self._begun) <= _LONGEST:
            if self._rust:
                # Its numbers stand in lines of their own, which may have been passed over as those of no meaning are.
                told, lost = _NOTHING_INSIDE.subn("None,\n", self._begun)
                self._take("tgi", dict(arguments(told)), everything=True)
                self._torn = lost > 0 or not inside
            else:
                self._told_command(self._begun)
        return inside

    def _told_command(self, text: str) -> bool:
        command = parse_command(text)
        if command is None or not (command.flags or command.model):
            return False
        if self.command is not None and len(command.flags) < len(self.command.flags):
            return False
        self.command, self._whole = command, True
        self.version = command.version or self.version
        known = [flag for flag in command.flags if not flag.unknown]
        self.values |= {flag.name: "True" if flag.value is None else flag.value for flag in known}
        return True

    def _dump(self, text: str, engine: str) -> bool:
        for whose, pattern in _DUMPS:
            dumped = pattern.search(text)
            if dumped is not None:
                self._torn = whose == "tgi" and not text.rstrip().endswith("}")
                self._take(whose or engine, dict(arguments(dumped[1])), everything=whose is not None)
                return True
        configured = _CONFIGURATION.search(text)
        if configured is not None:
            self._configuration(dict(arguments(configured[1])))
        return configured is not None

    def _take(self, engine: str, dumped: dict[str, Any], *, everything: bool) -> None:
        named = {profile(engine).canonical(name): value for name, value in dumped.items()}
        self._given, self._whole = named, True
        if everything:
            self._given = {name: value for name, value in named.items() if was_given(engine, name, value, named)}
            self._given |= {name: named[name] for name in MODEL_FLAGS if named.get(name)}
        for name, value in named.items():
            plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            if name in self._given or (everything and plain):
                self.values[name] = str(value)

    def _configuration(self, dumped: dict[str, Any]) -> None:
        self._derived = {profile("vllm").canonical(name): value for name, value in dumped.items()}
        if "max-seq-len" in self._derived:
            self._derived["max-model-len"] = self._derived.pop("max-seq-len")
        for name in (*_WRITTEN_FROM_CONFIGURATION, *MODEL_FLAGS):
            value = self._derived.get(name)
            if name != "dtype" and value not in (None, False) and not isinstance(value, Call | list | dict):
                self.values.setdefault(name, str(value))

    def _llama(self, text: str, engine: str | None) -> bool:
        seen = {name: pattern.search(text) for name, pattern in _LLAMA if engine in ("llama.cpp", None)}
        told = {name: found[1] for name, found in seen.items() if found is not None}
        self.values |= told
        return bool(told)

    def rank(self, process: str) -> None:
        """Of SGLang's lines: TP1 shows that there are two at least, TP2 that there are four, as models are split."""
        for number in _RANK.findall(process):
            ranks = 1 << int(number).bit_length()
            if ranks > 1 and not self._whole and int(self.values.get("tensor-parallel-size", "1")) < ranks:
                self.values["tensor-parallel-size"] = str(ranks)

    @property
    def model(self) -> str | None:
        if self.command is not None and self.command.model is not None:
            return self.command.model
        return next((self.values[name] for name in MODEL_FLAGS if self.values.get(name)), None)

    def number(self, *names: str) -> float | None:
        for name in names:
            try:
                number = float(self.values.get(name, "nan"))
            except ValueError:
                continue
            if math.isfinite(number):
                return number
        return None

    @property
    def whole(self) -> bool:
        """Whether the command is told with all that was given."""
        return self.command is not None or (self._whole and not self._torn and not self.lost("vllm"))

    def lost(self, engine: str) -> list[str]:
        """Flags that were given and cannot be written again."""
        if self.command is not None or self.model is None:
            return []
        return written(engine, self.model, self._given, self.version)[1]

    def rebuilt(self, engine: str) -> ServerCommand | None:
        """The command that was seen, or one that says the same; None where not even the model is known."""
        return None if self.command is None and self.model is None else self.sketched(engine)

    def sketched(self, engine: str) -> ServerCommand | None:
        """The same; MODEL stands where the model is not known."""
        if self.command is not None:
            return self.command
        model = self.model or "MODEL"
        given = self._given if self._whole else dict(self._only_given(engine, model))
        return _parsed(written(engine, model, given, self.version)[0])

    def _only_given(self, engine: str, model: str) -> Iterable[tuple[str, Any]]:
        """Of a configuration, what no model and no default explains."""
        if engine == "llama.cpp":
            told = [(name, self.values[name]) for name, _ in _LLAMA[1:] if name in self.values]
            return [one for one in told if one != ("parallel", "1")]
        ranks = self.values.get("tensor-parallel-size", "1")
        values = {"tensor-parallel-size": None if ranks == "1" else ranks} | self._derived
        return [
            (name, value)
            for name in _WRITTEN_FROM_CONFIGURATION
            if (value := values.get(name)) not in (None, False, 1, "auto", "None", model, [model])
            and not isinstance(value, Call)
            and not (name == "quantization" and value not in _MADE_WHILE_LOADING)
            and not (name == "dtype" and str(value).endswith("bfloat16"))
            and not (name == "max-model-len" and value == _made_for(model))
        ]


def _made_for(model: str) -> int | None:
    """What a model of the catalogue reads, where it is one."""
    from holdfast.models import catalogue

    entry = catalogue.lookup(model)
    return None if entry is None else entry.config.get("max_position_embeddings")
