"""`holdfast`: finds the sub-command and hands over. Imports a command's module only when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import holdfast
from holdfast.cli.dotted_flags import joined
from holdfast.cli.output import UNFORESEEN_EXIT, flush, say_error, unforeseen
from holdfast.config import unsupported
from holdfast.config.setting import Refusal, flag_name, refuse
from holdfast.config.tuning import TUNING
from holdfast.engine_profiles.profile import other_engine, translated
from holdfast.errors import ConfigurationError, HoldfastError, RequestError
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.engine.startup.prespawn import EarlyProcess

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "run-batch": "run a batch file of requests, resuming a run that was interrupted",
    "run": "chat with a model, serving it in the background",
    "chat": "chat with a model in the terminal",
    "ps": "list running servers and the memory they hold",
    "top": "watch running servers: memory, requests, speed",
    "stop": "stop a running server",
    "pull": "download a model ahead of time",
    "list": "list the models on this machine",
    "show": "show what a model is, and what fits here",
    "rm": "remove a downloaded model",
    "kv-store": "list, verify and prune KV pages that servers keep on a disk",
    "models": "list the models that are built in, cached and known",
    "plan": "show what fits before anything is loaded",
    "bench": "put a server under load, and say whether it passes",
    "tune": "find the settings that answer the most of your traffic in time",
    "rescue": "run a server; if it fails, fix its command and restart it",
    "doctor": "explain why a server failed, and how to fix it",
    "explain": "explain an error code",
}

FOLDERS = {"stored": ("kv-store", "list", "models", "pull", "rm", "show"), "running": ("ps", "stop", "top")}
"""Of commands that have one: those of what is stored on this machine, and of servers that run."""
NEAR = 0.6
"""How alike two flags are when one may be meant for the other."""
JSON = ("plan", "models", "list", "kv-store", "show", "ps", "top", "explain", "doctor", "bench", "tune")
"""Commands with --json."""
_FLAG = re.compile(r"--[a-zA-Z][\w.-]*")
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)[A-Za-z]*$")
"""With a unit, too, it is the value of a flag, which refuses it, and no flag."""
_JOINED = re.compile(r"(-tp|-pp|-dp|-O)(\d+)")
_SHORT = {short: flag_name(name) for name, spellings in unsupported.SHORT.items() for short in spellings}

READER_LEFT_EXIT = 128 + 13
"""As a shell says of a program that was still writing when its reader left."""

REQUIRED = "the following arguments are required: "
OVERVIEW = """examples:
  holdfast run smollm2                       chat; a server is started, and stays for the next time
  holdfast serve                             the built-in model on http://127.0.0.1:8000
  holdfast serve ./my-model --port 9000      a folder, a .gguf file or a hub id
  holdfast chat                              chat with the built-in model, no server needed
  holdfast plan llama-3.1-8b --gpu rtx4090   what fits, and with which settings
  holdfast COMMAND --help                    the settings of one command
"""


class _Parser(argparse.ArgumentParser):
    """Says a mistake as every other one is said."""

    _words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if (misspelt := _misspelt(message, self._words, self)) is not None:
            refuse(misspelt)
        raise ConfigurationError(message, fix=f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        self._negative_number_matcher = _NEGATIVE
        return super().parse_known_args(args, namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Without argparse's guesses of flags with one dash, which it makes even where none may be cut short: -c is not
        -cmoe, and -np is not -n with the value p. -c8192 stays -c with its value."""
        able = super()._get_option_tuples(option_string)
        return [one for one in able if re.match(r"[\d.=]", option_string.removeprefix(one[1])) is not None]


def main(arguments: Sequence[str] | None = None, *, early: EarlyProcess | None = None) -> int:
    """`early`: an engine process that waits already, of `serve`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatched(given, early)
    except (ConfigurationError, RequestError) as error:
        say_error(error, as_json=_wants_json(given))
        return 2
    except HoldfastError as error:
        say_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return READER_LEFT_EXIT
    except Exception as error:
        say_error(unforeseen(error))
        return UNFORESEEN_EXIT
    finally:
        flush()


def _dispatched(given: list[str], early: EarlyProcess | None) -> int:
    if not given or given[0] in ("-h", "--help"):
        return _overview(sys.stdout if given else sys.stderr, 0 if given else 2)
    if given[0] in ("-V", "--version"):
        print(f"holdfast {holdfast.__version__}")
        return 0
    if given[0] not in COMMANDS:
        return _unknown_command(given[0])
    try:
        module, parsed = parse_command_line(given)
    except ConfigurationError as error:
        if given[0] == "serve":
            from holdfast.cli.working_command import with_working_command

            with_working_command(error, given, parse_command_line)
        raise
    if given[0] == "serve":  # A server repeats in its log how it was started.
        return int(module.run(parsed, tuple(given), parse_command_line, early))
    return int(module.run(parsed))


def parse_command_line(given: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of a command, and its words as it wants them; raises for one that is not understood."""
    folder = next((f"{folder}." for folder, names in FOLDERS.items() if given[0] in names), "")
    module = importlib.import_module(f"holdfast.cli.commands.{folder}{given[0].replace('-', '_')}")
    program, words = f"holdfast {given[0]}", list(given[1:])
    if hasattr(module, "chosen"):  # A command of several, each with words of its own.
        other, words = module.chosen(words)
        module, program = (module, program) if other is None else (other, f"{program} {given[1]}")
    parser = _Parser(
        prog=program,
        usage=getattr(module, "USAGE", None),
        description=module.HELP,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    # Words of a prompt may stand behind flags.
    parse = parser.parse_known_intermixed_args if given[0] == "run" else parser.parse_known_args
    parsed, unknown = parse(spelled(joined(words)))
    if unknown:
        known_but_absent = module.refused_settings(parsed) if hasattr(module, "refused_settings") else []
        near = _meant(unknown, parser)
        try:
            refuse([*_unknown_arguments(unknown, near, parser.prog), *known_but_absent])
        except ConfigurationError as error:
            error.unknown, error.meant = tuple(unknown), near
            raise
    return module, parsed


def _wants_json(given: list[str]) -> bool:
    """A mistake in the words is told to a program as its answer would have been."""
    return given[:1] in ([name] for name in JSON) and "--json" in given


def _overview(stream: object, code: int) -> int:
    about = "Serves large language models within the memory that is actually free."
    lines = ["usage: holdfast COMMAND ...", "", about, ""]
    lines += [f"  {name:<9} {help}" for name, help in COMMANDS.items()]
    print("\n".join(lines), OVERVIEW, sep="\n\n", end="", file=stream)  # type: ignore[call-overload]
    return code


def spelled(words: Sequence[str]) -> list[str]:
    """As vLLM reads them: `_` for `-` in a flag's name, and a number right behind -tp, -pp, -dp and -O. What follows
    `--` is somebody else's."""
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        joined, short = _JOINED.fullmatch(word), name.partition(".")[0]
        if joined:
            found += [joined[1], joined[2]]
        elif short != name and short in _SHORT:  # -cc.mode, of a setting that is taken or refused as a whole.
            found.append(_SHORT[short] + equals + value)
        elif _FLAG.fullmatch(name):
            found.append(_whole_name(name.replace("_", "-")) + equals + value)
        else:
            found.append(word)
    return [*found, *words[end:]]


def _whole_name(flag: str) -> str:
    """--compilation-config.level is a part of a setting that is taken or refused as a whole."""
    whole, _, part = flag.partition(".")
    name = whole[2:].replace("-", "_")
    known = name in unsupported.ENGINE or name in unsupported.SERVER or name in TUNING
    return whole if part and known else flag


def _meant(unknown: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Of flags that there are not the one for the same setting, where another engine has them; else the nearest that
    there is, for those that are like one."""
    # Compared without their dashes, which make short names look alike. What is hidden would be refused itself.
    shown = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
    known = {name.lstrip("-"): name for action in shown for name in action.option_strings if "=" not in name}
    found: dict[str, str] = {}
    for flag in [word.split("=")[0] for word in unknown]:
        if other_engine(flag, "holdfast") is not None:
            same = translated(flag, "holdfast")
            found |= {flag: same} if same is not None and same in known.values() else {}
            continue
        near = difflib.get_close_matches(flag.lstrip("-"), known, n=1, cutoff=NEAR)
        found |= {flag: known[near[0]]} if near else {}
    return found


def _misspelt(message: str, words: Sequence[str], parser: argparse.ArgumentParser) -> list[Refusal] | None:
    """Of flags that are missing, those that were given, misspelt: argparse looks for what is missing first."""
    if REQUIRED not in message:
        return None
    known = {name for action in parser._actions for name in action.option_strings}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    missing = message.partition(REQUIRED)[2]
    meant = {flag: name for flag, name in _meant(unknown, parser).items() if name in missing.replace(",", " ").split()}
    wrong = [word for word in unknown if word.split("=")[0] in meant]
    return _unknown_arguments(wrong, meant, parser.prog) if wrong else None


def _unknown_arguments(unknown: list[str], meant: Mapping[str, str], program: str) -> list[Refusal]:
    """Flags, without their values, which may be secret; or where there is none among them the words themselves."""
    found = []
    for word in [word.split("=")[0] for word in unknown if word.startswith("-")] or unknown[:1]:
        near = meant.get(word.split("=")[0])
        fix = f"see {program} --help" if near is None else f"did you mean {near}?"
        other = other_engine(word, "holdfast") if word.startswith("-") else None
        if other is not None:
            here = (
                f"none here is the same: leave it out, or see {program} --help"
                if near is None
                else f"here it is {near}"
            )
            if near is None and other.canonical(word.split("=")[0]) in ("cache-type-k", "cache-type-v"):
                here = "--kv-cache-dtype fp8 keeps keys and values in 8 bits here"
            fix = f"a flag of {other.name}; {here}"
        found.append(Refusal(shorten(word), "", word, fix=fix, problem="is not understood"))
    return found


def _unknown_command(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean holdfast {near[0]}?" if near else "see holdfast --help"
    print(f"holdfast: there is no command {name!r}; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
