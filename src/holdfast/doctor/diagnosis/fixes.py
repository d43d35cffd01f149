"""From a rule's fixes to commands: values worked out from the log's numbers, flags in the engine's own words.

Only what can be worked out whole is given; a fix with an unknown in it is left out, and so is one that does not hold
(fix_checks.py).
"""

from __future__ import annotations

import re
import shlex
from functools import cache

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import kv_token_gib, longest_of
from holdfast.doctor.diagnosis.fix_checks import Changes, Facts, sound
from holdfast.doctor.diagnosis.kv_budget import context_in_ram, room_for_kv
from holdfast.doctor.diagnosis.llama_layers import experts_in_ram, layers_that_fit
from holdfast.doctor.diagnosis.out_of_memory import UNIFIED_GIB
from holdfast.doctor.evidence.log_state import Event, LogState
from holdfast.doctor.findings import Basis, Fix
from holdfast.doctor.rules.formulas import evaluate, filled, holds, written
from holdfast.doctor.rules.formulas import names as formula_names
from holdfast.doctor.rules.load import FixRule, Rule
from holdfast.engine_profiles.profile import Profile, engines, other_engine, profile, release, translated
from holdfast.errors import ConfigurationError

_SETTINGS = {
    "max_model_len": "max-model-len",
    "utilization": "gpu-memory-utilization",
    "tp": "tensor-parallel-size",
    "max_num_seqs": "max-num-seqs",
    "batched": "max-num-batched-tokens",
    "max_lora_rank": "max-lora-rank",
    "max_loras": "max-loras",
    "layers_on_gpu": "n-gpu-layers",
    "n_cpu_moe": "n-cpu-moe",
    "swap_space": "swap-space",
    "graph_batch": "max-cudagraph-capture-size",
    "input_tokens": "max-input-tokens",
    "port": "port",
}
"""What rules call a setting, and what it is called elsewhere."""
_RULES_NAMES = {ours: name for name, ours in _SETTINGS.items()}
_SPELLED_TOO = {"tensor-parallel-size": ("tp",), "max-input-tokens": ("max-input-length",)}
"""Older or shorter names in what engines print."""
_OF_KV = frozenset(("kv_short_gib", "after_load_gib", "weights_gib"))
"""Without one of these nothing can be reckoned of KV, and no model need be looked up."""
_EXPERTS_PLACED = frozenset(("override-tensor", "cpu-moe"))
"""Flags with which experts are in RAM already, as far as somebody wants them there."""
_GGUF_FOLDER = re.compile(r"(?i)(?:gguf|[-_.]i?q[2-8](?:_[\dk])?(?:_[sml])?)/?$")
_SIXTEEN_BIT = re.compile(r"(?i)(?<![a-z0-9])(?:bf16|fp16|bfloat16|float16)(?![a-z0-9])")
_QUANTIZED_NAME = re.compile(r"(?i)awq|gptq|int[48]|w[48]a\d|quant|-4bit|-8bit")
_OWN_WEIGHTS = re.compile(r"(?i)^(?:[./~]|[a-z]:).*(?:checkpoint|merged|fine.?tun|\bsft\b|lora|outputs?/|saved|export)")
"""A folder that somebody wrote: no hub has it."""
_WINDOWED = re.compile(
    r"(?i)gemma-?[234]|gpt-oss|llama-?4|mistral-7b-v0\.1|qwen3[.-](?:next|5)|mamba|jamba|nemotron-(?:h|nano)|granite-4|phi-?3"
)
"""Families with layers whose KV does not grow with the context."""
_OF_THE_MODEL = frozenset(
    (
        *("tool-call-parser", "reasoning-parser", "quantization", "load-format", "tokenizer-mode", "config-format"),
        *("task", "runner", "convert", "device", "speculative-algorithm", "kv-cache-dtype"),
    )
)
"""Flags whose value a model or a machine may need: one of those that an older release lists does not replace it."""
_DEBIAN = {
    "libgomp.so.1": "libgomp1",
    "libGL.so.1": "libgl1",
    "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1",
    "libibverbs.so.1": "libibverbs1",
}
"""Packages of libraries that Debian and Ubuntu have, and minimal images have not."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.gguf)")
FLAGS_NAMED = 16
"""Of a message that names flags, so many are put right: a line may be anything."""


def known_numbers(log: LogState, event: Event) -> dict[str, float]:
    """By the names that rules use: settings, what the log told before, what the line itself said; the last wins."""
    engine = profile(log.engine or "vllm")
    numbers = {name: engine.defaults[ours] for name, ours in _SETTINGS.items() if ours in engine.defaults}
    if log.engine in (None, "vllm"):
        numbers["utilization"] = _default_utilization(log.version)
        numbers |= {"before_chunks": 1.0} if () < release(log.version or "") < CHUNKS else {}
    for name, ours in _SETTINGS.items():
        value = log.settings.number(*_spellings(ours))
        if value is not None:
            numbers[name] = value
            numbers[f"{name}_set"] = value
    named = event.words.get("place") or log.settings.model
    if _GGUF_FOLDER.search(named or ""):
        numbers["gguf_folder"] = 1
    numbers["hub_name"] = float(_HUB_NAME.fullmatch(named or "MODEL/NAME") is not None)
    for name, said in (("quantized_name", _QUANTIZED_NAME), ("own_weights", _OWN_WEIGHTS), ("windowed", _WINDOWED)):
        numbers[name] = float(said.search(log.settings.model or "") is not None)
    numbers["model_named"] = float(log.settings.model is not None)
    numbers["llama_program"] = float("llama_program" in log.run.tags)
    numbers["of_ollama"] = float("ollama" in log.engines or "of_ollama" in log.run.tags)
    numbers["model_decides"] = float(event.words.get("flag", "").lstrip("-").replace("_", "-") in _OF_THE_MODEL)
    numbers["sixteen_bit"] = float(_SIXTEEN_BIT.search(log.settings.model or "") is not None)
    offloaded = log.settings.number("cpu-offload-gb")
    numbers["offload_asked"] = offloaded or 0.0
    told = {**numbers, **log.numbers, **event.numbers}
    if log.settings.whole or "utilization_set" in numbers or "utilization" in log.numbers:
        told["share_told"] = told.get("utilization", 0.0)
    if log.engine == "llama.cpp":
        told |= layers_that_fit(told)
        told.setdefault("served_slots", log.settings.number("parallel") or 1.0)
        if not log.settings.values.keys() & _EXPERTS_PLACED:
            told |= experts_in_ram(told, log.settings.model or log.words.get("model_file"))
            old = profile("llama.cpp").takes("n-cpu-moe", log.version) is False
            told |= {"experts_by_pattern": 1.0} if old else {}
    if log.engine == "ollama":
        told |= context_in_ram(told)
        told |= {"max_model_len": told["context_asked"]} if "context_asked" in told else {}
    if log.engine == "tgi":
        told.setdefault("tp", told.get("shards", 1))
    if log.engine == "sglang" and "free_at_start_gib" in told:
        told.setdefault("total_gib", told["free_at_start_gib"])
    if "card_gib" in told:
        told.setdefault("total_gib", told["card_gib"])
    told["unified"] = float(UNIFIED_GIB[0] <= told.get("total_gib", 0) < UNIFIED_GIB[1] or "unified" in log.run.tags)
    architecture = event.words.get("architecture")
    if profile(log.engine or "vllm").served_until(architecture or "") is not None:
        told["architecture_removed"] = 1.0
    elif (served := _served(log, architecture)) is not None:
        told["architecture_served"] = served
    if told.keys() & _OF_KV:
        told |= room_for_kv(
            log.engine or "vllm", told, kv_token_gib(log.settings.model), longest_of(log.settings.model)
        )
    return told


_FAMILY = {"ollama": "llama.cpp"}
"""Whose architectures an engine serves, where not its own."""


CHUNKS = (0, 8)
"""From it on vLLM computes prompts in chunks by itself; before it, it is asked for."""
_UNNUMBERED = re.compile(r"v?0\.(?:0|1)\.dev")
"""Versions of builds that do not know their own."""
INSPECTED_APART = (0, 6, 5)
"""From it on vLLM says otherwise that a class which it has could not be looked into: its install is broken."""


def _served(log: LogState, architecture: str | None) -> float | None:
    """Whether a newer release serves what this one refused; None: it is not known, as of a class that this one may
    have too. Python's engines list classes, not types of a config."""
    engine = log.engine
    of_transformers = not (architecture or "")[:1].isupper()  # Its own release decides, which may be the older one.
    architecture = None if architecture is None else profile(engine or "vllm").class_of(architecture)
    if engine is None or architecture is None or (engine in ("vllm", "sglang") and not architecture[0].isupper()):
        return None
    if _UNNUMBERED.match(log.version or ""):
        return None
    at = release(log.version or "")
    of = profile(_FAMILY.get(engine, engine))
    served = of.serves(architecture)
    if served and engine == "llama.cpp" and at >= release(of.newest_read.lstrip("b")):
        return None  # It has it, or another file than was meant was loaded.
    if not served or engine not in ("vllm", "sglang"):
        return None if served is None else float(served)
    since = release(of.serves_since(architecture) or "")
    if at:
        return 1.0 if since and at < since else None
    return 1.0 if since >= INSPECTED_APART and not of_transformers else None


@cache
def _spellings(setting: str) -> tuple[str, ...]:
    """Of every engine: a log may tell a setting before it tells whose it is."""
    found = dict.fromkeys((setting, *_SPELLED_TOO.get(setting, ())))
    for engine in engines():
        spelled = profile(engine).spelling(setting)
        if spelled is not None:
            found[profile(engine).canonical(spelled)] = None
    return tuple(found)


def _default_utilization(version: str | None) -> float:
    """Of that release of vLLM."""
    from holdfast.planner.compat.vllm_release import parse_vllm

    try:
        return parse_vllm(f"=={version}").default_utilization if version else 0.9
    except ConfigurationError:
        return 0.9


def known_words(log: LogState, event: Event) -> dict[str, str]:
    command, engine = base_command(log), profile(log.engine or "vllm")
    architecture = engine.class_of(event.words.get("architecture", ""))
    return {
        "model": log.settings.model or "MODEL",
        "fetch_again": _fetch_again(log.engine, log.settings.model or _file(log) or "MODEL"),
        "package": engine.package,
        "asked_quoted": _requirements(event.words.get("asked", "")),
        "debian_package": _DEBIAN.get(event.words.get("library", ""), ""),
        "distribution": event.words.get("module", "").replace("llama_cpp", "llama-cpp-python"),
        "since": engine.serves_since(architecture) or "",
        "until": engine.served_until(architecture) or "",
        "newest": profile(_FAMILY.get(log.engine or "", log.engine or "vllm")).newest_read,
        "command": "" if command is None else command.with_changes({}),
        **log.words,
        **event.words,
    }


def _requirements(asked: str) -> str:
    """As a shell takes them: a version's < and > are its own signs."""
    return " ".join(shlex.quote(one) if re.search(r"[<>\[]", one) else one for one in asked.split())


def _file(log: LogState) -> str | None:
    """Of llama.cpp, which is given a file and no name of the hub."""
    return log.words.get("model_file", "MODEL.gguf") if log.engine == "llama.cpp" else None


def _fetch_again(engine: str | None, model: str) -> str:
    if engine == "ollama":  # What it logs is the file of a layer, which has another name than the model.
        name = "NAME" if "/" in model or "\\" in model or model == "MODEL" else shlex.quote(model)
        return f"ollama rm {name}; ollama pull {name}"
    if model.endswith(".gguf"):
        return f"ls -l {shlex.quote(model)}; sha256sum {shlex.quote(model)}"
    if model.startswith(("/", "./", "~")):
        return f"ls -l {shlex.quote(model)}; sha256sum {shlex.quote(model.rstrip('/'))}/*.safetensors"
    return f"hf download {shlex.quote(model)} --force-download"


def fixes(log: LogState, rule: Rule, event: Event, numbers: dict[str, float]) -> list[Fix]:
    """Those that can be worked out, the best first. `numbers`: those that are known of the event."""
    found: list[Fix] = []
    if not rule.fix:
        return found
    facts, words = _facts(log, event, numbers), known_words(log, event)
    for one in rule.fix:
        fix = _fix(log, one, facts, words)
        if fix is not None and fix not in found:
            found.append(fix)
    return found


def base_command(log: LogState) -> ServerCommand | None:
    """What was run, as far as it is known; MODEL stands where the model is not."""
    return log.settings.sketched(log.engine or "vllm")


def _fix(log: LogState, rule: FixRule, facts: Facts, words: dict[str, str]) -> Fix | None:
    engine, numbers = facts.engine, dict(facts.numbers)
    if (rule.engines and engine not in rule.engines) or not holds(rule.when, numbers):
        return None
    asked: dict[str, str | None] = {}
    names: dict[str, str] = {}
    for ours, formula in rule.change.items():
        if "{" in ours:
            asked |= _told(facts, ours, words)
            continue
        flag, value = profile(engine).spelling(ours), _changed(formula, numbers, words)
        if flag is None or (value is None and formula is not False):
            return None
        asked[flag], names[flag] = value, ours
    if rule.change and not asked:
        return None
    checked = sound(facts, asked)
    if checked is None:
        return None
    changes, said = checked
    values: dict[str, object] = {**words, **numbers}
    values |= {f"new_{names[flag].replace('-', '_')}": value for flag, value in changes.items() if flag in names}
    command = None
    if changes:
        command = None if facts.command is None else facts.command.with_changes(changes)
        if facts.command is not None and facts.whole and command == facts.command.with_changes({}):
            return None  # It is so already.
    elif rule.run:
        command = filled((rule.run,), values) or None
    why = filled((rule.why,), values)
    if rule.why and not why:
        return None
    # What was asked for and what holds are two things: then only the second is explained.
    adjusted = any(changes.get(flag) != value for flag, value in asked.items() if flag in changes)
    why = said if adjusted and said else "; ".join(one for one in (why, said) if one)
    rest = _rest(log, facts) if changes else ""
    price = filled((rule.price,), values) or None
    corrected = [
        flag for flag, value in changes.items() if value is not None and flag not in names and "{flag}" in rule.change
    ]
    replaced = _replaced(facts, changes) if "{flag}" in rule.change else None
    others = _of_others(engine, changes) if "{flag}" in rule.change else ""
    if replaced is not None:
        why, price = replaced[0], None
    elif others:
        why, price = others, None if corrected else price
    elif corrected:
        why, price = f"the flag is spelled {', '.join(corrected)}", None
    elif "{flag}" in rule.change and (meant := _meant(engine, changes)):
        why = f"{meant}; {why}"
    if changes.get("--dtype") == "float32" and asked.get("--dtype") != "float32":
        price = "weights and KV take twice the memory"
    known = bool(corrected) or (replaced is not None and replaced[1])
    basis: Basis = "stated" if known else _basis(rule, facts, names, changes)
    return Fix(command=command, changes=changes, why=f"{why}{rest}", price=price, basis=basis)


def _facts(log: LogState, event: Event, numbers: dict[str, float]) -> Facts:
    settings = log.settings
    known = settings.rebuilt(log.engine or "vllm") is not None
    return Facts(
        engine=log.engine or "vllm",
        version=log.version or settings.version,
        command=base_command(log),
        whole=known and settings.whole,
        model=settings.model,
        numbers=numbers,
        assumed=frozenset() if known and settings.whole else _assumed(log, event, numbers),
        told=frozenset(event.numbers),
    )


def _assumed(log: LogState, event: Event, numbers: dict[str, float]) -> frozenset[str]:
    told = log.numbers.keys() | event.numbers.keys() | {name for name in _SETTINGS if f"{name}_set" in numbers}
    return frozenset(_SETTINGS.keys() - told)


def _basis(rule: FixRule, facts: Facts, names: dict[str, str], changes: Changes) -> Basis:
    """What the rule says; else of the change: a number that is made of none in the log, or in place of one that the log
    does not show (it may be set already), is a first try, and so are a flag that is taken away unseen and more GPUs
    than were used, which may not be there."""
    if rule.basis is not None:
        return rule.basis
    if not changes:
        return "look" if rule.run else "usual"
    computed, gpus = False, max(facts.numbers.get(name, 1.0) for name in ("tp", "asked", "gpus"))
    for flag, ours in names.items():
        formula, value = rule.change[ours], changes.get(flag)
        if formula is False and not (facts.command is not None and facts.command.has(flag)):
            return "first_try"
        if value is None or formula is False or not re.fullmatch(r"[\d.]+", value):
            continue
        of = frozenset() if str(formula).startswith("'") else formula_names(str(formula))
        unseen = not of & facts.told and _RULES_NAMES.get(ours) in facts.assumed
        more_gpus = ours == "tensor-parallel-size" and float(value) > gpus
        if not of or of & facts.assumed or unseen or more_gpus:
            return "first_try"
        computed = True
    return "computed" if computed else "usual"


_LEFT_OUT = "leave it out"


def _replaced(facts: Facts, changes: Changes) -> tuple[str, bool] | None:
    """What newer releases have in place of flags that were refused, and whether that is why they were: all of them are
    known, and are to be left out, or the release is known to be after the last that took them."""
    of = profile(facts.engine)
    rows = {flag: row for flag in changes if (row := of.flag(flag.lstrip("-")).replaced_by)}
    refused_too = any(changes.get(word, "") is None for row in rows.values() for word in row.split())
    if not rows or refused_too:
        return None
    left_out = [f"{flag}: {row}" for flag, row in rows.items() if row.startswith(_LEFT_OUT)]
    others = list(dict.fromkeys(row for row in rows.values() if not row.startswith(_LEFT_OUT)))
    why = "; ".join([*left_out, *([f"in its place newer releases have {', '.join(others)}"] if others else [])])
    at = release(facts.version or "")
    last = [of.flag(flag.lstrip("-")).until for flag, row in rows.items() if not row.startswith(_LEFT_OUT)]
    after = all(bool(at) and until is not None and at[: len(until)] > until for until in last)
    return why, after and all(flag in rows for flag, value in changes.items() if value is None)


def _rest(log: LogState, facts: Facts) -> str:
    """What the command lacks, said: a flag that is not there is a flag that was taken away."""
    if facts.whole or log.settings.rebuilt(facts.engine) is None or facts.engine == "ollama":
        return ""
    lost = log.settings.lost(facts.engine)
    return f"; and your {', '.join(lost)}, which the log does not show in full" if lost else "; and your other flags"


def _told(facts: Facts, ours: str, words: dict[str, str]) -> dict[str, str | None]:
    """The flags that the message itself names, taken away; one that is only misspelt is put right, and one of another
    engine is written as this one spells the same setting."""
    engine, command = facts.engine, facts.command
    told = filled((ours,), words).split()
    named = [word for word in told if word.startswith("-") and len(word) > 1]
    found: dict[str, str | None] = {}
    for word in named[:FLAGS_NAMED] or told[:1]:
        flag = word.split("/")[0].split("=")[0].rstrip(",:;.`'\"")
        if not re.fullmatch(r"-{0,2}[A-Za-z][\w-]*", flag):
            continue
        flag = flag if flag.startswith("-") else f"--{flag.replace('_', '-')}"
        found[flag] = None
        value = command.value(flag) if command is not None and command.has(flag) else None
        instead = profile(engine).instead(flag, value)
        if instead is not None:
            found |= instead
            continue
        same = None if _of_another(engine, flag) is None else translated(flag, engine)
        if same is not None:
            after = told[told.index(word) + 1 :]
            value = after[0] if value is None and after and not after[0].startswith("-") else value
            value = "" if profile(engine).is_boolean(same.lstrip("-")) else word.partition("=")[2] or value
            found |= {} if value is None else {same: value}
            continue
        near = profile(engine).nearest(flag) or _with_hyphens(engine, flag)
        if near is None:
            continue
        if command is not None and command.has(flag):
            found[f"--{near}"] = command.value(flag) or ""
        elif word in named and "_" in flag:
            after = told[told.index(word) + 1 :]
            found[f"--{near}"] = after[0] if after and not after[0].startswith("-") else ""
    return found


def _of_another(engine: str, flag: str) -> Profile | None:
    """The engine whose flag it is, where this one never had it."""
    return other_engine(flag, engine) if profile(engine).takes(profile(engine).canonical(flag)) is None else None


def _of_others(engine: str, changes: Changes) -> str:
    """Whose flags were taken away, and how this engine spells the same; nothing where none is another's."""
    said = []
    for flag in (flag for flag, value in changes.items() if value is None):
        other, same = _of_another(engine, flag), translated(flag, engine)
        here = f"none of {profile(engine).name} is the same" if same is None else f"here it is {same}"
        here += "" if same is None or same in changes else ", with the same value"
        said += [] if other is None else [f"{flag} is a flag of {other.name}; {here}"]
    return "; ".join(said)


def _meant(engine: str, changes: Changes) -> str:
    """Of flags that are taken away because their value is not seen: which ones they may have been meant for."""
    near = {flag: profile(engine).nearest(flag) for flag, value in changes.items() if value is None}
    return ", ".join(f"{flag} may be meant for --{name}" for flag, name in near.items() if name is not None)


def _with_hyphens(engine: str, flag: str) -> str | None:
    """SGLang takes no underscores."""
    spelled = flag.lstrip("-").replace("_", "-")
    return spelled if engine == "sglang" and "_" in flag and profile(engine).takes(spelled) else None


def _changed(formula: object, numbers: dict[str, float], words: dict[str, str]) -> str | None:
    if formula is False:
        return None
    if not (text := str(formula)):
        return ""
    if text.startswith("'"):
        return filled((text.strip("'"),), {**words, **numbers}) or None
    return None if (value := evaluate(text, numbers)) is None else written(value)
