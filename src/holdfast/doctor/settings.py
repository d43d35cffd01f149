"""The settings a log tells: its dumps of arguments, the engine's own configuration line, a command in its text.

Reads how engines print what they were given; judges none of it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping

from holdfast.doctor.commands import ServerCommand, parse_command
from holdfast.doctor.spellings import MODEL_FLAGS, canonical

_NON_DEFAULT = re.compile(r"non-default args: (\{.*)")
_NAMESPACE = re.compile(r"args: (?:vLLM )?Namespace\((.*)")
_SERVER_ARGS = re.compile(r"server_args\s*=\s*ServerArgs\((.*)|^ServerArgs\((.*)")
_CONFIGURATION = re.compile(r"Initializing (?:an?|the)(?: V\d)? LLM engine.* with config: (.*)")
_TGI_FIELD = re.compile(r"^\s{4}(\w+): (?:Some\()?\n?\s*(\"[^\"]*\"|[\w.]+),?\)?")
_PAIR = re.compile(r"['\"]?(\w+)['\"]?[=:] ?('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,\s(){}]+)")
_COMMAND = re.compile(
    r"\bvllm serve\b|vllm[./]entrypoints[./]|\bapi_server\.py\b|sglang[. ](?:launch_server|serve)|\bllama-server\b"
    r"|\bserver -m |llama_cpp\.server|text-generation-launcher --|\bollama serve\b|\bholdfast serve\b|\bLLM\("
    r"|\bsgl\.Engine\("
    r"|(?:docker|podman) run .*(?:vllm|sglang|text-generation|llama|ollama|holdfast)"
)
_FRAME = re.compile(r"^\s*(?:File|-+>|\d+ )|\^\^\^|site-packages|dist-packages")

_DEFAULTS = {
    "gpu-memory-utilization": ("0.9", "0.92"),
    "tensor-parallel-size": ("1",),
    "dtype": ("auto",),
    "max-loras": ("1",),
    "kv-cache-dtype": ("auto",),
    "swap-space": ("4", "4.0"),
    "cpu-offload-gb": ("0", "0.0"),
    "max-lora-rank": ("16",),
    "pipeline-parallel-size": ("1",),
    "port": ("8000", "30000"),
    "max-num-seqs": ("256",),
    "mem-fraction-static": (),
}
_TOLD = (
    "model",
    "model-path",
    "model-id",
    "dtype",
    "quantization",
    "quantize",
    "max-model-len",
    "context-length",
    "max-total-tokens",
    "gpu-memory-utilization",
    "mem-fraction-static",
    "cuda-memory-fraction",
    "tensor-parallel-size",
    "tp-size",
    "num-shard",
    "pipeline-parallel-size",
    "max-num-seqs",
    "max-running-requests",
    "max-num-batched-tokens",
    "chunked-prefill-size",
    "kv-cache-dtype",
    "swap-space",
    "cpu-offload-gb",
    "enforce-eager",
    "enable-lora",
    "max-loras",
    "max-lora-rank",
    "speculative-model",
    "speculative-config",
    "num-speculative-tokens",
    "enable-prefix-caching",
    "trust-remote-code",
    "tokenizer",
    "port",
    "limit-mm-per-prompt",
    "max-batch-prefill-tokens",
    "max-batch-total-tokens",
)
"""Of a dump of everything, the few that a command is told by; the rest are defaults."""


class Settings:
    """Gathered as the log is read: what was set, and the command where one was seen."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.command: ServerCommand | None = None
        self.listing = False
        self._exact = False
        """What was given was told as such; a dump of everything beside it adds nothing."""

    def read(self, text: str, engine: str | None) -> bool:
        """Whether the line told any."""
        found = False
        exact, dumped = _dumped(text, engine or "vllm")
        for name, value in dumped:
            found = True
            if exact:
                self.values[name] = value
            elif not self._exact:
                self.values.setdefault(name, value)
        self._exact = self._exact or (exact and found)
        if not found:
            found = self._tgi(text)
        if not found and _COMMAND.search(text) is not None and not _FRAME.search(text):
            command = parse_command(text)
            if command is not None and (command.flags or command.model) and self._better(command):
                self.command, self._exact = command, True
                for flag in command.flags:
                    self.values[flag.name] = flag.value if flag.value is not None else "True"
                found = True
        return found

    def _better(self, command: ServerCommand) -> bool:
        return self.command is None or len(command.flags) >= len(self.command.flags)

    def _tgi(self, text: str) -> bool:
        """One field a line: Args { model_id: "...", ... }."""
        if text.rstrip().endswith("Args {"):
            self.listing = True
            return True
        if not self.listing:
            return False
        field = _TGI_FIELD.match(text)
        if field is None:
            self.listing = not text.startswith("}")
            return False
        name, value = canonical("tgi", field[1]), field[2].strip('"')
        if name in _TOLD and value not in ("None", "false"):
            self.values[name] = value
        return True

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
                return float(value)
            except ValueError:
                continue
        return None

    def rebuilt(self, engine: str) -> ServerCommand | None:
        """The command that was seen, or one that says the same; None where not even the model is known."""
        if self.command is not None:
            return self.command
        if self.model is None:
            return None
        return parse_command(_written(engine, self.model, self.values))


def _written(engine: str, model: str, values: Mapping[str, str]) -> str:
    start = {
        "vllm": "vllm serve {}",
        "sglang": "python -m sglang.launch_server --model-path {}",
        "llama.cpp": "llama-server -m {}",
        "tgi": "text-generation-launcher --model-id {}",
        "ollama": "ollama serve",
        "holdfast": "holdfast serve {}",
    }[engine].format(shlex.quote(model))
    words = []
    for name, value in values.items():
        if name in MODEL_FLAGS or value in ("None", "False", "") or value in _DEFAULTS.get(name, ()):
            continue
        words.append(f"--{name}" if value == "True" else f"--{name} {shlex.quote(_plain(value))}")
    return " ".join([start, *words])


def _plain(value: str) -> str:
    """A list of one as its one; other literals as they are."""
    if value.startswith("[") and value.count(",") == 0:
        return value.strip("[]'\"")
    return value.replace("'", '"') if value.startswith("{") else value


def _dumped(text: str, engine: str) -> tuple[bool, list[tuple[str, str]]]:
    """Whether these are what was given and no more, and what they are."""
    given = _NON_DEFAULT.search(text)
    if given is not None:
        try:
            document = ast.literal_eval(given[1])
            if isinstance(document, dict):
                return True, [(canonical(engine, str(name)), str(value)) for name, value in document.items()]
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
        return True, list(_pairs(given[1], engine, everything=True))
    whole = _NAMESPACE.search(text) or _SERVER_ARGS.search(text) or _CONFIGURATION.search(text)
    if whole is None:
        return False, []
    return False, list(_pairs(next(group for group in whole.groups() if group is not None), engine, everything=False))


def _pairs(text: str, engine: str, *, everything: bool) -> Iterator[tuple[str, str]]:
    for name, value in _PAIR.findall(text):
        known = canonical(engine, name)
        plain = value.strip("'\"").rstrip(")")
        if known == "max-seq-len":
            known = "max-model-len"
        if not everything and (known not in _TOLD or plain in ("None", "False") or plain in _DEFAULTS.get(known, ())):
            continue
        if known == "dtype":
            plain = plain.removeprefix("torch.")
        if known in ("tokenizer",) and not everything:
            continue
        yield known, plain
