"""`holdfast show`: what a model is, how it is stored and what of it fits here. Reads headers; fetches nothing.

Where the model is not on this machine, the catalogue or the hub's headers tell, as for a plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.output import say, say_json
from holdfast.errors import ConfigurationError, HoldfastError, printable

if TYPE_CHECKING:
    from holdfast.checkpoints import ModelFiles
    from holdfast.models import ModelSpec
    from holdfast.planner.inputs.question import PlannedModel

HELP = """Show what a model is: architecture, parameters, quantization, context, template, licence, size, and what fits
on this machine. Nothing is loaded or downloaded."""

USAGE = "holdfast show [MODEL] [--template] [--json]"

EXAMPLES = """examples:
  holdfast show smollm2                    the built-in model
  holdfast show ./model.gguf               a file or folder
  holdfast show llama3.1:8b --json         a name that `holdfast plan` knows, for programs
  holdfast show smollm2 --template         the chat template alone

exit codes: 0 shown, 1 the model cannot be read, 2 there is no such model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("--template", action="store_true", help="print the chat template and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON: one object")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.checkpoints import DEFAULT_MODEL

    name = arguments.model or DEFAULT_MODEL
    files = _files_here(name)
    if arguments.template:
        if files is None or not files.chat_template:
            raise ConfigurationError(
                f"{name} has no chat template on this machine",
                fix=f"holdfast pull {name}" if files is None else "serve it with --chat-template",
            )
        say(files.chat_template.splitlines())
        return 0
    found = _described(name, files)
    if arguments.json:
        say_json(found)
    else:
        say(_lines(found))
    return 0


def _files_here(name: str) -> ModelFiles | None:
    """None: they are not on this machine."""
    from holdfast.checkpoints import from_path, locate
    from holdfast.checkpoints.sources import builtin
    from holdfast.checkpoints.sources.stored_models import stored_models
    from holdfast.cli.servers.background import identity

    entry = builtin.find(name)
    folder = name.rpartition(":")[0]
    if Path(name).expanduser().exists() or (folder and Path(folder).expanduser().is_dir()):
        return locate(name, progress=False)
    if entry is not None:
        return locate(name, progress=False) if builtin.is_cached(entry) else None
    wanted = identity(name)
    stored = next((one for one in stored_models() if one.name == wanted and one.complete), None)
    return None if stored is None else from_path(stored.path, name=name, kind="hub")


def _described(name: str, files: ModelFiles | None) -> dict[str, Any]:
    from holdfast.checkpoints import describe

    if files is not None:
        spec, planned = describe(files), None
    else:
        from holdfast.planner.models.resolve import resolve_model

        planned = resolve_model(name).model
        spec = planned.spec
    return {
        "name": name,
        "here": files is not None,
        "path": None if files is None else str(files.path),
        "architecture": spec.architecture,
        "runs_here": spec.runnable,
        "unsupported": list(spec.unsupported),
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "format": planned.format if planned is not None else files.format if files is not None else "none",
        "quantization": _quantization(spec, files, planned),
        "context": spec.max_position,
        "layers": len(spec.layers),
        "embedding": spec.hidden_size,
        "vocabulary": spec.vocab_size,
        "size_bytes": _size(files),
        "license": _license(name, files),
        "template": _template(files),
        "sampling": _sampling(files),
        "fits": _fits(name if files is None or files.kind != "hub" else str(files.path)),
    }


def _quantization(spec: ModelSpec, files: ModelFiles | None, planned: PlannedModel | None) -> str | None:
    """By the most common type of a GGUF's bytes; of safetensors by what the config says."""
    from holdfast.checkpoints.sources.select_files import quantization_of

    if spec.quantization is not None:
        return spec.quantization.method
    if files is not None and files.header is not None:
        named = quantization_of(files.path.name)
        if named is not None:
            return named
        taken: dict[str, int] = {}
        for tensor in files.header.tensors.values():
            taken[tensor.layout] = taken.get(tensor.layout, 0) + tensor.nbytes
        return max(taken, key=lambda layout: taken[layout], default=None)
    if planned is not None and planned.made_as is not None:
        return planned.made_as
    return spec.stored_dtype


def _size(files: ModelFiles | None) -> int | None:
    from holdfast.checkpoints.sources.stored_models import size_of

    return None if files is None else size_of(files.weights)


def _license(name: str, files: ModelFiles | None) -> str | None:
    from holdfast.checkpoints.sources import builtin
    from holdfast.checkpoints.sources.stored_models import license_of

    entry = builtin.find(name)
    if entry is not None:
        return entry.licence
    if files is None:
        return None
    if files.header is not None:
        said = files.header.metadata.get("general.license.name") or files.header.metadata.get("general.license")
        if isinstance(said, str) and said:
            return said
    return license_of(files.path if files.path.is_dir() else files.path.parent)


def _template(files: ModelFiles | None) -> dict[str, Any] | None:
    if files is None:
        return None
    text = files.chat_template or ""
    return {"present": bool(text), "tools": "tools" in text, "thinking": "think" in text, "characters": len(text)}


def _sampling(files: ModelFiles | None) -> dict[str, Any] | None:
    from holdfast.config import EngineConfig
    from holdfast.engine.requests.sampling_defaults import default_sampling

    return None if files is None else default_sampling(EngineConfig(), files)


def _fits(name: str) -> dict[str, Any]:
    """What `holdfast plan` says of this machine, in short."""
    from holdfast.config.plan import PlanConfig
    from holdfast.planner.api import question_of
    from holdfast.planner.fit.search import describe_devices, fit

    try:
        question = question_of(PlanConfig.from_arguments(model=name))
        found = fit(question)
    except HoldfastError as error:
        return {"fits": False, "reason": error.message}
    return {
        "fits": found.fits,
        "on": describe_devices(question.machine.all_devices),
        "short_bytes": found.short_bytes,
        "max_model_len": found.limits.max_model_len,
        "max_num_seqs": found.limits.max_num_seqs,
        "weights_bytes": found.weights_bytes,
    }


def _lines(found: dict[str, Any]) -> list[str]:
    from holdfast.units import format_bytes

    template, fits = found["template"], found["fits"]
    active = found["active_parameters"]
    parameters = f"{found['parameters']:,}" + (f", {active:,} active" if active != found["parameters"] else "")
    rows = {
        "model": found["name"],
        "where": found["path"] or f"not on this machine; holdfast pull {found['name']} fetches it",
        "architecture": found["architecture"],
        "parameters": parameters,
        "format": found["format"] if found["format"] != "none" else "-",
        "quantization": found["quantization"] or "-",
        "context": f"{found['context']:,} tokens",
        "shape": f"{found['layers']} layers of width {found['embedding']:,}; vocabulary {found['vocabulary']:,}",
        "size": "-" if found["size_bytes"] is None else format_bytes(found["size_bytes"]),
        "license": found["license"] or ("not stated in its files" if found["here"] else "-"),
        "template": _template_words(template),
        "sampling": ", ".join(f"{key} {value}" for key, value in (found["sampling"] or {}).items()) or "API defaults",
        "fits here": _fit_words(found, fits),
    }
    if template is None:
        del rows["template"], rows["sampling"]
    width = max(map(len, rows)) + 2
    return [f"{key:<{width}}{printable(str(value))}" for key, value in rows.items()]


def _template_words(template: dict[str, Any] | None) -> str:
    if template is None or not template["present"]:
        return "none: serve it with --chat-template"
    extra = [word for word in ("tools", "thinking") if template[word]]
    return "yes" + (f", with {' and '.join(extra)}" if extra else "") + "; --template prints it"


def _fit_words(found: dict[str, Any], fits: dict[str, Any]) -> str:
    from holdfast.units import format_bytes

    if not found["runs_here"]:
        return "no: Holdfast cannot run it: " + "; ".join(found["unsupported"])
    if "on" not in fits:
        return f"no: {fits['reason']}"
    if not fits["fits"]:
        return f"no, {format_bytes(fits['short_bytes'])} short on {fits['on']}; see holdfast plan {found['name']}"
    weights = format_bytes(fits["weights_bytes"])
    return f"yes, {fits['max_model_len']:,} tokens of context on {fits['on']}; weights take {weights}"
