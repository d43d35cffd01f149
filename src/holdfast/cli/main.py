"""`holdfast`: finds the sub-command and hands over. Imports a command's module only when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import holdfast
from holdfast.cli.output import UNFORESEEN_EXIT, flush, say_error, unforeseen
from holdfast.errors import ConfigurationError, HoldfastError, RequestError
from holdfast.units import shorten

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "run-batch": "answer a file of requests, and go on where a run was cut short",
    "chat": "talk to a model in the terminal",
    "pull": "fetch a model ahead of time",
    "models": "list the models that are built in, cached and known",
    "plan": "say what fits before anything is loaded",
    "rescue": "run a server's command, and start it again with what it died of put right",
    "doctor": "say what happened to a server, and what helps",
    "ps": "list running servers and the memory they hold",
    "explain": "say what an error's code means",
}

READER_LEFT_EXIT = 128 + 13
"""As a shell says of a program that was still writing when its reader left."""

OVERVIEW = """examples:
  holdfast serve                             the built-in model on http://127.0.0.1:8000
  holdfast serve ./my-model --port 9000      a folder, a .gguf file or a hub id
  holdfast chat                              talk to the built-in model, no server needed
  holdfast plan llama-3.1-8b --gpu rtx4090   what fits, and with which settings
  holdfast COMMAND --help                    the settings of one command
"""


class _Parser(argparse.ArgumentParser):
    """Says a mistake as every other one is said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message, fix=f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatched(given)
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


def _dispatched(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        return _overview(sys.stdout if given else sys.stderr, 0 if given else 2)
    if given[0] in ("-V", "--version"):
        print(f"holdfast {holdfast.__version__}")
        return 0
    if given[0] not in COMMANDS:
        return _unknown_command(given[0])
    module = importlib.import_module(f"holdfast.cli.{given[0].replace('-', '_')}")
    parser = _Parser(
        prog=f"holdfast {given[0]}",
        usage=getattr(module, "USAGE", None),
        description=module.HELP,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parsed, unknown = parser.parse_known_args(given[1:])
    if unknown:
        raise _unknown_argument(unknown[0], parser)
    # A server repeats in its log how it was started.
    return int(module.run(parsed, tuple(given)) if given[0] == "serve" else module.run(parsed))


def _wants_json(given: list[str]) -> bool:
    """A mistake in the words is told to a program as its answer would have been."""
    return given[:1] in (["plan"], ["models"], ["ps"], ["explain"], ["doctor"]) and "--json" in given


def _overview(stream: object, code: int) -> int:
    lines = ["usage: holdfast COMMAND ...", "", "Serves large language models on the memory a machine really has.", ""]
    lines += [f"  {name:<9} {help}" for name, help in COMMANDS.items()]
    print("\n".join(lines), OVERVIEW, sep="\n\n", end="", file=stream)  # type: ignore[call-overload]
    return code


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> ConfigurationError:
    # Compared without their dashes, which make short names look alike.
    flags = (name for action in parser._actions for name in action.option_strings if "=" not in name)
    known = {name.lstrip("-"): name for name in flags}
    near = difflib.get_close_matches(argument.split("=")[0].lstrip("-"), known, n=1)
    return ConfigurationError(
        f"{shorten(argument)} is not understood",
        fix=f"did you mean {known[near[0]]}?" if near else f"see {parser.prog} --help",
    )


def _unknown_command(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean holdfast {near[0]}?" if near else "see holdfast --help"
    print(f"holdfast: there is no command {name!r}; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
