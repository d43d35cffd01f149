"""Models larger than the GPU's memory: tokens a second, bytes moved a step, how busy the link was, what the driver saw.

    python benchmarks/tiers.py [--models FOLDER] ROW [ROW...]
        rows: llama-70b-int4, llama-70b-int4-nvme, llama-70b-int4-link: without the host's cores,
              llama-8b-bf16, llama-8b-bf16-link, qwen3-30b-a3b-q4k, qwen3-30b-a3b-q4k-zipf,
              llama-70b-q4k, llama-70b-int4-files: the start from files in the page cache
        --models FOLDER     keep the files that are written, FOLDER/ROW, and take those that are there
        --write             only write them
        --out FILE          what is printed goes to the end of this file as well, line by line
        --llama FOLDER      llama-batched-bench and llama-bench of this folder too, on the file of a row that has one
        --ncmoe 30,31,32    with the experts of so many layers on the cores, one after the other
        --ngl 43,44         of a model without experts: with so many layers on the GPU
        --vllm SITE         vLLM too, for rows that say how: a folder for PYTHONPATH; `installed`: the one that is there
        --engines vllm      only these, of holdfast, llama.cpp and vllm; Holdfast's figures of the ratios are then those
                            in --out
        --limit-s 500       for all of it: what is not done then is ended, and said

Dummy weights in real shapes, or random ones in files where TMPDIR has room (40 GB for a 70B: /dev/shm), written before
a row and removed after it; prompts of token ids, no tokenizer, ends ignored, no prefix cache. Each engine is a process
of its own (tier_worker.py) and prints a line of JSON for each batch as it is measured. One that fails is named, the
others go on, and the exit code is 1. After each other engine come the ratios of Holdfast to it, for llama.cpp to the
fastest of its settings that keeps to the row's budget of VRAM. RAM is to be at most `ram_allowed_mib`: --ram, or what
was planned for tiers without it, and 3 GiB of the process's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_peers import machine
from benchmarks.gpu_worker import LLAMA, SHAPES
from benchmarks.machine import commit, today
from benchmarks.random_checkpoints import awq_config

Line = dict[str, Any]
WORKER = Path(__file__).with_name("tier_worker.py")
LLAMA_70B: dict[str, Any] = LLAMA | {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


class Row(NamedTuple):
    config: dict[str, Any]
    settings: dict[str, Any]
    batches: tuple[tuple[int, int, int], ...]
    """Sequences, tokens of each prompt, tokens of each answer."""
    stored: str | None = None
    """A file of random weights, q4_k (GGUF) or awq; None: dummies of the config."""
    skew: float = 0.0
    """How much its routers prefer some experts."""
    prompts: tuple[int, ...] = ()
    """Tokens of prompts that are measured by themselves, one at a time."""
    vllm: dict[str, Any] | None = None
    """Settings with which vLLM serves this row; None: it does not."""


USUAL = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
PREFETCH = {
    "vram_gib": 24, "offload_backend": "prefetch", "offload_group_size": 2, "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
}  # fmt: skip
"""Every second layer of vLLM's in RAM. 24 GiB are more than the row's budget, and it takes 26: its ratios are told as
outside the budget."""
ROWS = {
    "llama-70b-int4": Row(
        awq_config(LLAMA_70B),
        USUAL | {"vram": "22.93GiB"},
        ((1, 128, 32), (8, 128, 64), (32, 128, 64)),
        vllm=USUAL | PREFETCH,
    ),
    "llama-70b-int4-nvme": Row(
        awq_config(LLAMA_70B),
        USUAL | {"vram": "22.93GiB", "ram": "8GiB", "nvme_path": "/var/tmp"},
        ((1, 32, 6), (32, 128, 6)),
    ),
    "llama-8b-bf16": Row(
        SHAPES["llama-8b"],
        USUAL | {"vram": "12GiB", "max_num_seqs": 8, "kv_cache_memory_bytes": "2064MiB"},
        ((8, 1900, 64),),
    ),
}
ROWS["llama-8b-bf16-link"] = ROWS["llama-8b-bf16"]._replace(
    settings=ROWS["llama-8b-bf16"].settings | {"cpu_compute": "off"}
)
"""A step takes as long as its bytes do over the link, within 5%."""
ROWS["llama-70b-int4-link"] = ROWS["llama-70b-int4"]._replace(
    settings=ROWS["llama-70b-int4"].settings | {"cpu_compute": "off"}, vllm=None
)
"""All that is streamed comes over the link, also for one sequence: it is busy for 95% of the time."""
EXPERTS = Row(
    SHAPES["qwen3-30b-a3b"],
    USUAL | {"vram": "8GiB"},
    ((1, 128, 132), (8, 128, 68), (32, 128, 36)),
    stored="q4_k",
    prompts=(512, 2000),
)
ROWS |= {"qwen3-30b-a3b-q4k": EXPERTS, "qwen3-30b-a3b-q4k-zipf": EXPERTS._replace(skew=0.3)}
ROWS |= {
    "llama-70b-q4k": Row(
        LLAMA_70B, USUAL | {"vram": "22.93GiB"}, ((1, 128, 24), (8, 128, 16), (32, 128, 16)), stored="q4_k"
    ),
    "llama-70b-int4-files": Row(LLAMA_70B, USUAL | {"vram": "22.93GiB"}, ((1, 128, 8),), stored="awq"),
}
LLAMA_TOKENS = 16
"""Of answers of llama.cpp's programs, which time decoding by itself."""


def write(name: str, folder: Path, say: Callable[[Line], None]) -> Path:
    """The model. In a process of its own: what it takes on the GPU and in RAM goes with it."""
    code = (
        "import json, pathlib, sys; from benchmarks.random_checkpoints import write_awq, write_q4_k;"
        " row = json.loads(sys.argv[1]); path = pathlib.Path(sys.argv[2]);"
        " write_awq(row['config'], path) if row['stored'] == 'awq' else write_q4_k(row['config'], path, row['skew'])"
    )
    row = ROWS[name]
    path = folder / "model.gguf" if row.stored == "q4_k" else folder
    about = json.dumps({"config": row.config, "stored": row.stored, "skew": row.skew})
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, about, str(path)], check=True, cwd=Path(__file__).parent.parent)
    say({"row": name, "written_s": round(time.perf_counter() - begin, 1)})
    return path


def kept(name: str, models: Path, say: Callable[[Line], None]) -> Path:
    """The model of this row in that folder, written unless it is there."""
    folder = models / name
    if not folder.exists():
        unfinished = models / f"{name}.unfinished"
        unfinished.mkdir(parents=True)
        write(name, unfinished, say)
        unfinished.rename(folder)
    return folder / "model.gguf" if ROWS[name].stored == "q4_k" else folder


class Said:
    """Lines as they are printed, and kept at the end of a file if there is one; those that were there count too."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        there = out.read_text().splitlines() if out is not None and out.exists() else []
        self.lines: list[Line] = [json.loads(line) for line in there]

    def say(self, line: Line) -> None:
        print(json.dumps(line), flush=True)
        self.lines.append(line)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Turn(NamedTuple):
    """One engine on one row."""

    engine: str
    settings: dict[str, Any]
    batches: list[tuple[int, int, int]]
    prompts: list[int]
    about: Line
    """What its lines say of its settings."""


def turns(row: Row, asked: argparse.Namespace) -> list[Turn]:
    """Of the engines that are asked for, those that can serve this row."""
    batches, prompts = list(row.batches), list(row.prompts)
    found = [Turn("holdfast", row.settings, batches, prompts, {})]
    if asked.llama is not None and row.stored == "q4_k":
        experts = "num_experts" in row.config
        short = [(sequences, prompt, LLAMA_TOKENS) for sequences, prompt, _ in batches]
        for count in asked.ncmoe if experts else asked.ngl:
            about = {"ncmoe": count} if experts else {"ngl": count}
            found.append(Turn("llama.cpp", {"ngl": 99} | about, short, prompts[:1], about))
    if asked.vllm is not None and row.vllm is not None:
        about = {"vram_gib": row.vllm["vram_gib"]}
        found.append(Turn("vllm", row.vllm, batches, [], about))
    return [turn for turn in found if turn.engine in asked.engines]


def lines_of(command: list[str], environment: dict[str, str], limit_s: float) -> Iterator[Line]:
    """Of a worker; what it prints besides is passed on. Ends with a line that says so if the worker failed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
            else:
                print(text, end="", flush=True)
        if process.wait():
            yield {"failed": "no time was left" if late.is_set() else f"ended with {process.returncode}"}
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):  # What it started may outlive it, and hold the GPU's memory.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def take(turn: Turn, name: str, model: Path, asked: argparse.Namespace, end_s: float, said: Said) -> bool:
    """Whether it came to its end."""
    work = {
        "model": str(model), "dummies": ROWS[name].stored is None, "settings": turn.settings, "batches": turn.batches,
        "prompts": turn.prompts, "programs": str(asked.llama or ""),
    }  # fmt: skip
    environment = dict(os.environ)
    if turn.engine == "vllm" and asked.vllm != Path("installed"):
        environment["PYTHONPATH"] = str(asked.vllm)
    about = {"row": name, "engine": turn.engine} | turn.about
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(work, file)
        file.flush()
        left_s = end_s - time.monotonic()
        command = [sys.executable, str(WORKER), turn.engine, file.name]
        for line in lines_of(command, environment, max(left_s, 0.0)):
            said.say(about | line)
    return "failed" not in said.lines[-1]


def speeds(lines: list[Line]) -> dict[str, float]:
    """Of the last time that each was measured: decoding by sequences, and prompts by tokens."""
    found = dict[str, float]()
    for line in lines:
        if "batch" in line:
            found[str(line["batch"])] = line["decode_tok_per_s"]
        elif "prompt" in line:
            found[f"prompt of {line['prompt']:,}"] = line["tok_per_s"]
    return found


def ratios(name: str, engine: str, lines: list[Line]) -> Line | None:
    """Of Holdfast to this engine; None: one of them was not measured."""
    from holdfast.units import MIB, parse_bytes

    here = [line for line in lines if line.get("row") == name]
    ours = speeds([line for line in here if line.get("engine") == "holdfast"])
    sides = list[tuple[bool, float, Line, dict[str, float]]]()
    for about in {json.dumps(about_of(line)): about_of(line) for line in here if line.get("engine") == engine}.values():
        own = [line for line in here if line.get("engine") == engine and about_of(line) == about]
        measured, most = speeds(own), max((line["nvml_mib"] for line in own if "nvml_mib" in line), default=0)
        if common := [what for what in ours if what in measured]:
            within = most <= parse_bytes(ROWS[name].settings["vram"]) // MIB
            sides.append((within, measured[common[0]], about | {"nvml_mib": most}, measured))
    if not sides:
        return None
    within, _, about, best = max(sides, key=lambda side: side[:2])
    found = {what: round(speed / best[what], 3) for what, speed in ours.items() if what in best}
    return {"row": name, "ratios_to": engine} | about | {"within_budget": within, "ratios": found}


def about_of(line: Line) -> Line:
    return {name: line[name] for name in ("ncmoe", "ngl", "vram_gib") if name in line}


@contextlib.contextmanager
def model_of(name: str, models: Path | None, say: Callable[[Line], None]) -> Iterator[Path]:
    row = ROWS[name]
    if row.stored is not None and models is not None:
        yield kept(name, models, say)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-tiers-") as folder:
        if row.stored is None:
            (Path(folder) / "config.json").write_text(json.dumps(row.config))
            yield Path(folder)
        else:
            yield write(name, Path(folder), say)


def measure(asked: argparse.Namespace) -> bool:
    """Whether all went well."""
    said, end_s, well = Said(asked.out), time.monotonic() + asked.limit_s, True
    said.say({"date": today(), "commit": asked.commit or commit(), "machine": machine()})
    for name in asked.rows:
        mine = turns(ROWS[name], asked)
        try:
            with model_of(name, asked.models, said.say) as model:
                for engine in dict.fromkeys(turn.engine for turn in mine):
                    for turn in mine:
                        if turn.engine == engine:
                            well = take(turn, name, model, asked, end_s, said) and well
                    if engine != "holdfast" and (line := ratios(name, engine, said.lines)) is not None:
                        said.say(line)
        except subprocess.CalledProcessError as error:
            said.say({"row": name, "failed": f"its model was not written: {error.returncode}"})
            well = False
    return well


def counts(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--llama", type=lambda path: Path(path).resolve(), metavar="FOLDER")
    parser.add_argument("--ncmoe", type=counts, default=[31])
    parser.add_argument("--ngl", type=counts, default=[43])
    parser.add_argument("--vllm", type=Path, metavar="SITE")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["holdfast", "llama.cpp", "vllm"])
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--commit", help="of the code, where git is not there to be asked")
    parser.add_argument("rows", nargs="+", choices=sorted(ROWS), metavar="ROW")
    asked = parser.parse_args(given)
    if asked.write and asked.models is None:
        parser.error("--write writes into the folder of --models FOLDER")
    idle = [row for row in asked.rows if not turns(ROWS[row], asked)]
    if idle and not asked.write:
        parser.error(
            f"nothing to run for {', '.join(idle)}: llama.cpp wants --llama FOLDER and a row with a GGUF file, vllm"
            " --vllm SITE and a row that says how"
        )
    return asked


def main() -> int:
    asked = options()
    if not asked.write:
        return 0 if measure(asked) else 1
    for row in asked.rows:
        kept(row, asked.models, Said(asked.out).say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
