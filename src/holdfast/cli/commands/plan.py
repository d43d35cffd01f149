"""`holdfast plan`: what fits, before anything is downloaded or loaded. Words in, a table or JSON out; no torch.

Exit codes: 0 it fits, or runs with layers in the RAM that is there, 1 it does not, or the engine of --for does not run
it, 2 the question cannot be answered (a setting, a model that is not there), 70 a fault of our own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import UNFORESEEN_EXIT, say, say_error, say_json, unforeseen
from holdfast.config.plan import PlanConfig
from holdfast.config.setting import build
from holdfast.config.sources import FLAG, add_flags
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.observability.decisions import Decision
    from holdfast.planner.report.answer import PlanAnswer

HELP = """Show what a model needs and whether it fits, in a second: no torch, no GPU, no download.

Of a hub id only headers are read; a catalogue name needs no network at all."""

USAGE = "holdfast plan [MODEL] [--gpu NAME] [settings]"

EXAMPLES = """examples:
  holdfast plan llama-3.1-8b --gpu rtx4090                        a model and a GPU from the catalogues
  holdfast plan owner/name --gpu h100-80x2 -tp 2                  a hub id: its headers are read
  holdfast plan ./my-model --vram 22GiB --max-model-len 32K       a folder, on a GPU with 22 GiB to use
  holdfast plan model.gguf                                        a GGUF file, on this machine
  holdfast plan llama-3.1-70b --quantization awq --gpu a100-40    as if quantized
  holdfast plan qwen3-8b --gpu l4 --concurrency 16 --prompt 2000 --output 500
  holdfast plan qwen3-8b --gpu l4 --traffic access.log            for the P99 and the peak of real traffic
  holdfast plan qwen3-8b --compare rtx4090 l40s h100-80           compare GPUs side by side; or models
  holdfast plan --list-gpus                                       GPUs for --gpu; models: holdfast models --known

exit codes: 0 fits, or runs with layers in the RAM that is there (this machine's, or --ram); 1 does not fit, or not for
the engine of --for; 2 usage; 70 an internal error
"""
WIDTH_WITHOUT_TERMINAL = 100
NARROWEST = 60
CONTRADICTION = "HF143"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/plan-json.md)")
    parser.add_argument(
        "--for",
        dest="engine",
        metavar="ENGINE",
        help="engine to print the command for: holdfast, vllm, sglang or llama.cpp; vLLM also by version and runner: "
        "vllm==0.26, vllm==0.26:v1",
    )
    parser.add_argument(
        "--compare", nargs="+", metavar="NAME", help="compare these side by side: all GPUs, or all models"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--brief", action="store_true", help="only what fits and the best remedy; a command only with --for"
    )
    length.add_argument("--verbose", action="store_true", help="also compare rules of thumb with the exact figures")
    parser.add_argument("--list-gpus", action="store_true", help="list the GPUs that --gpu knows, and exit")
    add_flags(parser, PlanConfig, title="what to plan")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list_gpus:
        return _list_gpus(as_json=arguments.json)
    try:
        answers = _answers(arguments)
        _print(answers, arguments)
    except HoldfastError as error:
        say_error(error, as_json=arguments.json)
        return 2
    except Exception as error:  # Python's own exit code for it would say that the model does not fit.
        say_error(unforeseen(error), as_json=arguments.json)
        return UNFORESEEN_EXIT
    return 0 if all(answer.runs and not (arguments.engine and answer.lacks) for answer in answers) else 1


def read_settings(arguments: argparse.Namespace) -> PlanConfig:
    given = vars(arguments).copy()
    for name in ("json", "engine", "compare", "list_gpus", "brief", "verbose"):
        given.pop(name, None)
    positional = given.pop("model_positional", None)
    if given.get("model") is None:
        given["model"] = positional
    return build(PlanConfig, given, refused={}, origin=lambda name: FLAG)


def _answers(arguments: argparse.Namespace) -> list[PlanAnswer]:
    from holdfast.planner.api import question_of, traffic_of
    from holdfast.planner.report.answer import answer

    config = read_settings(arguments)
    if arguments.compare is not None and arguments.engine is not None:
        raise ConfigurationError(
            "--compare prints a table and no commands, so --for has no effect",
            code=CONTRADICTION,
            fix="leave one of the two out; --json has the commands of each",
            field="for",
        )
    configs = [config] if arguments.compare is None else compared(config, arguments.compare)
    traffic = traffic_of(config)
    questions = [question_of(one, traffic=traffic) for one in configs]
    said = _outranked(arguments)
    return [
        answer(replace(question, decisions=(*said, *question.decisions)), engine=arguments.engine)
        for question in questions
    ]


def _outranked(arguments: argparse.Namespace) -> tuple[Decision, ...]:
    """The flags of a way out go behind the command line that they answer, where they win."""
    from holdfast.observability.decisions import Decision

    positional, named = arguments.model_positional, getattr(arguments, "model", None)
    if positional in (None, named) or named is None:
        return ()
    return (Decision("model", shorten(named), f"--model overrides {shorten(positional)} before it", "set"),)


def compared(config: PlanConfig, names: list[str]) -> list[PlanConfig]:
    """GPUs when every name is one, else models; a MODEL or --gpu beside them is the first of the row."""
    from holdfast.hardware import gpus

    def is_gpu(name: str) -> bool:
        try:
            gpus.find_group(name)
        except ConfigurationError:
            return False
        return True

    known = [name for name in names if is_gpu(name)]
    foreign = [name for name in names if name not in known]
    if not known and config.model is not None and config.gpu is None and not any(map(_may_be_model, names)):
        gpus.find_group(names[0])  # Neither: with a model beside them they were meant as GPUs, and are refused as such.
    if known and foreign and _may_be_model(foreign[0]):
        raise ConfigurationError(
            "--compare takes GPUs or models, not both",
            code=CONTRADICTION,
            needed="all GPUs, or all models",
            found=f"{shorten(known[0])} is a GPU, {shorten(foreign[0])} is not",
            field="compare",
            fix="holdfast plan MODEL --compare GPU GPU, or holdfast plan --gpu GPU --compare MODEL MODEL",
        )
    if known and foreign:
        gpus.find_group(foreign[0])
    if known:
        if config.gpu is not None:
            names = [config.gpu, *names]
        configs = [replace(config, gpu=name) for name in names]
    else:
        if config.model is not None:
            names = [config.model, *names]
        configs = [replace(config, model=name) for name in names]
    if len(configs) < 2:
        raise ConfigurationError(
            "--compare needs two to compare",
            needed="two GPUs, or two models",
            found=names[0],
            field="compare",
            fix="holdfast plan MODEL --compare rtx4090 h100-80",
        )
    return configs


def _may_be_model(name: str) -> bool:
    from holdfast.checkpoints.sources import builtin
    from holdfast.models import catalogue

    return "/" in name or name.endswith(".gguf") or builtin.find(name) is not None or catalogue.lookup(name) is not None


# What is said


def _print(answers: list[PlanAnswer], arguments: argparse.Namespace) -> None:
    if arguments.json:
        documents = [answer.to_json() for answer in answers]
        whole: dict[str, Any] = {"compare": documents} if arguments.compare is not None else documents[0]
        say_json(whole)
        return
    from holdfast.planner.report.compare import compare_lines
    from holdfast.planner.report.text import lines

    width, colour = _terminal()
    if arguments.compare is not None:
        said = compare_lines(answers, width=width, colour=colour)
    else:
        said = lines(answers[0], width=width, colour=colour, brief=arguments.brief, verbose=arguments.verbose)
    say(said, colour=colour)


def _terminal() -> tuple[int, bool]:
    if not sys.stdout.isatty():
        return WIDTH_WITHOUT_TERMINAL, False
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return max(NARROWEST, shutil.get_terminal_size().columns), colour


def _list_gpus(*, as_json: bool) -> int:
    from holdfast.hardware import gpus
    from holdfast.units import format_bytes

    if as_json:
        say_json([asdict(gpu) for gpu in gpus.entries()])
        return 0
    say([f"{'--gpu':<18}{'usable':>12}{'GB/s':>8}{'fp16 TFLOP/s':>14}{'capability':>12}  name"])
    for gpu in gpus.entries():
        capability = "-" if gpu.compute_capability is None else ".".join(map(str, gpu.compute_capability))
        figures = f"{format_bytes(gpu.usable_bytes):>12}{gpu.bandwidth_gb_s:>8,.0f}{gpu.half_tflops:>14,.1f}"
        say([f"{gpu.key:<18}{figures}{capability:>12}  {gpu.name}"])
    return 0
