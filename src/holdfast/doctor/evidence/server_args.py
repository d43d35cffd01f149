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
from typing import Any

from holdfast.doctor.command.flag_aliases import MODEL_FLAGS, canonical
from holdfast.doctor.command.parse import ServerCommand, parse_command
from holdfast.doctor.evidence.argument_dumps import Call, arguments, rust_arguments
from holdfast.doctor.evidence.rebuild_command import was_given, written

_NON_DEFAULT = re.compile(r"non-default args: \{(.*)")
_NAMESPACE = re.compile(r"args: (?:vLLM )?Namespace\((.*)")
_SERVER_ARGS = re.compile(r"server_args\s*=\s*ServerArgs\((.*)|^ServerArgs\((.*)")
_CONFIGURATION = re.compile(
    r"(?:Initializing|Dumping input data for) (?:(?:an?|the) )?.*?LLM engine.*? with config: (.*)"
)
_VERSION = re.compile(r"(?:vLLM API server version |LLM engine \(v)(\d+\.\d+(?:\.\d+)?)")
_RUST = "Args {"
_RUST_LINE = re.compile(r"[}\])]|\s+(?:\w+: \S|[\"\w./:-]+,?$|[)\]}],?$)")
_NOTHING_INSIDE = re.compile(r"Some\(\s*\n(?=\s{4}\w+:|\})")
_COMMAND = re.compile(
    r"\bvllm serve\b|vllm[./]entrypoints[./]|\bapi_server\.py\b|sglang[. ](?:launch_server|serve)|\bllama-server\b"
    r"|\bserver -m |llama_cpp\.server|text-generation-launcher --|\bollama serve\b|\bholdfast serve\b|\bLLM\("
    r"|\bsgl\.Engine\("
    r"|(?:docker|podman) run .*(?:vllm|sglang|text-generation|llama|ollama|holdfast)"
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
        self._last: tuple[str, ServerCommand | None] | None = None

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
        inside = _RUST_LINE.match(text) is not None if self._rust else True
        if inside:
            self._begun = f"{self._begun}\n{text}"
        ended = not inside or text.startswith("}") if self._rust else not text.rstrip().endswith("\\")
        if len(self._begun) > _LONGEST:
            self.listing = False
        elif ended:
            self.listing = False
            if self._rust:
                # Its numbers stand in lines of their own, which may have been passed over as those of no meaning are.
                told, lost = _NOTHING_INSIDE.subn("None,\n", self._begun)
                self._take("tgi", dict(rust_arguments(told)), everything=True)
                self._torn = lost > 0 or not inside
            else:
                self._told_command(self._begun)
        return inside

    def _told_command(self, text: str) -> bool:
        command = parse_command(text)
        if command is None or not (command.flags or command.model) or not self._better(command):
            return False
        self.command, self._whole = command, True
        self.version = command.version or self.version
        for flag in command.flags:
            if not flag.unknown:
                self.values[flag.name] = flag.value if flag.value is not None else "True"
        return True

    def _better(self, command: ServerCommand) -> bool:
        return self.command is None or len(command.flags) >= len(self.command.flags)

    def _dump(self, text: str, engine: str) -> bool:
        given = _NON_DEFAULT.search(text)
        if given is not None:
            self._take(engine, dict(arguments(given[1])), everything=False)
            return True
        whole = _NAMESPACE.search(text)
        if whole is not None:
            self._take("vllm", dict(arguments(whole[1])), everything=True)
            return True
        whole = _SERVER_ARGS.search(text)
        if whole is not None:
            self._take("sglang", dict(arguments(whole[1] or whole[2])), everything=True)
            return True
        if f"{_RUST} " in text:
            self._torn = not text.rstrip().endswith("}")
            self._take("tgi", dict(rust_arguments(text.split(f"{_RUST} ", 1)[1])), everything=True)
            return True
        configured = _CONFIGURATION.search(text)
        if configured is not None:
            self._configuration(dict(arguments(configured[1])))
        return configured is not None

    def _take(self, engine: str, dumped: dict[str, Any], *, everything: bool) -> None:
        named = {canonical(engine, name): value for name, value in dumped.items()}
        if everything:
            given = {name: value for name, value in named.items() if was_given(engine, name, value, named)}
            given |= {name: named[name] for name in MODEL_FLAGS if named.get(name)}
        else:
            given = named
        self._given, self._whole = given, True
        for name, value in named.items():
            plain = isinstance(value, str | int | float | bool) and value is not False
            if name in given or (everything and plain and not isinstance(value, bool)):
                self.values[name] = str(value)

    def _configuration(self, dumped: dict[str, Any]) -> None:
        named = {canonical("vllm", name): value for name, value in dumped.items()}
        if "max-seq-len" in named:
            named["max-model-len"] = named.pop("max-seq-len")
        self._derived = named
        for name in (*_WRITTEN_FROM_CONFIGURATION, *MODEL_FLAGS):
            if name == "dtype" or named.get(name) in (None, False) or isinstance(named[name], Call | list | dict):
                continue
            if name not in self.values:
                self.values[name] = str(named[name])

    def _llama(self, text: str, engine: str | None) -> bool:
        if engine not in ("llama.cpp", None):
            return False
        told = False
        for name, pattern in _LLAMA:
            found = pattern.search(text)
            if found is not None:
                told = True
                self.values[name] = found[1]
        return told

    def rank(self, process: str) -> None:
        """Of SGLang's lines: TP1 shows that there are two at least."""
        for number in _RANK.findall(process):
            ranks = int(number) + 1
            if ranks > 1 and not self._whole and int(self.values.get("tensor-parallel-size", "1")) < ranks:
                self.values["tensor-parallel-size"] = str(ranks)

    @property
    def model(self) -> str | None:
        if self.command is not None and self.command.model is not None:
            return self.command.model
        return next((self.values[name] for name in MODEL_FLAGS if self.values.get(name)), None)

    def number(self, *names: str) -> float | None:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            try:
                number = float(value)
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
        text = written(engine, model, given, self.version)[0]
        if self._last is None or self._last[0] != text:  # It is asked for with every fix.
            self._last = text, parse_command(text)
        return self._last[1]

    def _only_given(self, engine: str, model: str) -> Iterable[tuple[str, Any]]:
        """Of a configuration, what no model and no default explains."""
        if engine == "llama.cpp":
            for name, _ in _LLAMA[1:]:
                if name in self.values and (name, self.values[name]) != ("parallel", "1"):
                    yield name, self.values[name]
            return
        ranks = self.values.get("tensor-parallel-size", "1")
        for name in _WRITTEN_FROM_CONFIGURATION:
            value = self._derived.get(name, ranks if name == "tensor-parallel-size" and ranks != "1" else None)
            if value in (None, False, 1, "auto", "None", model, [model]) or isinstance(value, Call):
                continue
            if name == "quantization" and value not in _MADE_WHILE_LOADING:
                continue
            if name == "dtype" and str(value).endswith("bfloat16"):
                continue
            if name == "max-model-len" and value == _made_for(model):
                continue
            yield name, value


def _made_for(model: str) -> int | None:
    """What a model of the catalogue reads, where it is one."""
    from holdfast.models import catalogue

    entry = catalogue.lookup(model)
    return None if entry is None else entry.config.get("max_position_embeddings")
