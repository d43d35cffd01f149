"""Models larger than the GPU's memory: tokens a second, bytes moved a step, how busy the link was, what the driver saw.

    python benchmarks/tiers.py [--models FOLDER] ROW [ROW...]
        rows: llama-70b-int4, llama-70b-int4-nvme, llama-8b-bf16, llama-8b-bf16-link: without the host's cores,
              qwen3-30b-a3b-q4k, qwen3-30b-a3b-q4k-zipf,
              llama-70b-q4k, llama-70b-int4-files: the start from files in the page cache
        --models FOLDER     keep the files that are written, FOLDER/ROW, and take those that are there
        --write             only write them
        --out FILE          what is printed goes to the end of this file as well, line by line
        --llama FOLDER      llama-batched-bench and llama-bench of this folder in place of Holdfast, on a row's file
        --ncmoe 28,30,32    with the experts of so many layers on the cores, one after the other; the best of those
                            that keep to the row's budget is what to compare with

Dummy weights in real shapes, or random ones in files where TMPDIR has room (40 GB for a 70B: /dev/shm); prompts of
token ids, no tokenizer, ends ignored, no prefix cache. Each row is an engine in a process of its own with a budget of
VRAM, a line of JSON for each batch as it is measured. Figures of decoding are the difference of a long run and a short
one with the same prompts, so that prompts are not in them.
The most that NVML saw in use is sampled five times a second throughout, other processes included, and so is this
process's RAM (RssAnon and RssShmem, in which pinned memory is; and by how much less the system could give than at the
start), beside what it may be: --ram, or what was planned for tiers without it, and 3 GiB of the process's own.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_worker import LLAMA, SHAPES
from benchmarks.random_checkpoints import awq_config

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


USUAL = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
ROWS = {
    "llama-70b-int4": Row(
        awq_config(LLAMA_70B), USUAL | {"vram": "22.93GiB"}, ((1, 128, 32), (8, 128, 64), (32, 128, 64))
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
SHORT_TOKENS = 4
"""Of answers in the short run."""
NVML_PERIOD_MS = 200
HOST_S = 120
"""That the host may take until it is decided what it computes."""


def watch_nvml(most: list[int]) -> subprocess.Popen[str]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(NVML_PERIOD_MS)]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            most[0] = max(most[0], int(line))

    threading.Thread(target=read, daemon=True).start()
    return process


class RamWatch:
    """Of this process, and of the system: sampled by a thread as often as NVML is."""

    def __init__(self) -> None:
        from holdfast.hardware import memory, resident

        self._available, self.most, self.taken = memory().available_bytes, 0, 0

        def sample() -> None:
            while True:
                held = resident()
                self.most = max(self.most, 0 if held is None else held.now_bytes - held.files_bytes)
                self.taken = max(self.taken, self._available - memory().available_bytes)
                time.sleep(NVML_PERIOD_MS / 1000)

        threading.Thread(target=sample, daemon=True).start()

    def told(self) -> dict[str, int]:
        return {"ram_mib": self.most >> 20, "ram_taken_mib": self.taken >> 20}


def ram_allowed(llm: Any, asked: str | None) -> int:
    """Bytes. `asked`: as --ram has it; None: what was planned."""
    from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES
    from holdfast.units import parse_bytes

    below = [] if llm.info.memory is None else llm.info.memory.below
    planned = sum(term.planned_bytes for tier in below if tier.tier == "ram" for term in tier.terms)
    return HOST_ENGINE_BYTES + (planned if asked is None else parse_bytes(asked))


def say(line: dict[str, Any], out: Path | None) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Run(NamedTuple):
    seconds: float
    steps: int
    copied_bytes: int
    busy_s: float
    stalled_s: float
    pairs: int
    hits: int
    host_s: float


class Stages:
    """How long each stage of a start took, in seconds: from its first word to the next one's."""

    def __init__(self) -> None:
        from holdfast.engine.startup import progress

        self._begun: list[tuple[str, float]] = [("plan", time.perf_counter())]
        hear = progress.LoadProgress.__call__

        def heard(bar: Any, stage: str, done: int, total: int) -> None:
            if stage != self._begun[-1][0]:
                self._begun.append((stage, time.perf_counter()))
            hear(bar, stage, done, total)

        progress.LoadProgress.__call__ = heard  # type: ignore[method-assign,assignment]

    def seconds(self) -> dict[str, float]:
        found = dict[str, float]()
        ends = [begun for _, begun in self._begun[1:]] + [time.perf_counter()]
        for (stage, begun), end in zip(self._begun, ends, strict=True):
            found[stage] = round(found.get(stage, 0.0) + end - begun, 2)
        return found


class HostDecided(logging.Handler):
    """Whether the host computes some layers is decided after the start, and said in a line."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.line, self._said = time.perf_counter(), "", threading.Event()
        logging.getLogger("holdfast").addHandler(self)
        logging.getLogger("holdfast").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("cpu_compute:"):
            self.line = f"{record.getMessage()} (after {time.perf_counter() - self.begin:.1f} s)"
            self._said.set()

    def wait(self) -> str:
        self._said.wait(HOST_S)
        return self.line


def run(llm: Any, sequences: int, prompt: int, output: int) -> Run:
    from holdfast import SamplingParams
    from holdfast.records import ExpertUse

    draw = random.Random(sequences)
    prompts = [[draw.randint(0, 120000) for _ in range(prompt)] for _ in range(sequences)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output, detokenize=False)
    before, begin = llm.get_stats(), time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds, after = time.perf_counter() - begin, llm.get_stats()
    assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
    used, since = before.experts or ExpertUse(), after.experts or ExpertUse()
    return Run(
        seconds,
        after.steps_total - before.steps_total,
        after.links[0].copied_bytes - before.links[0].copied_bytes,
        after.links[0].busy_s - before.links[0].busy_s,
        after.links[0].stalled_s - before.links[0].stalled_s,
        since.pairs - used.pairs,
        since.hits - used.hits,
        since.host_s - used.host_s,
    )


def figures(sequences: int, output: int, whole: Run, short: Run) -> dict[str, float]:
    """Of a batch: with its prompts, and of decoding alone."""
    seconds, steps = whole.seconds - short.seconds, whole.steps - short.steps
    copied, busy_s = whole.copied_bytes - short.copied_bytes, whole.busy_s - short.busy_s
    return {
        "tok_per_s": sequences * output / whole.seconds,
        "decode_tok_per_s": sequences * (output - SHORT_TOKENS) / seconds,
        "step_s": seconds / steps,
        "gb_per_step": copied / steps / 1e9,
        "link_gb_per_s": copied / seconds / 1e9,
        "link_busy": busy_s / seconds,
        "gpu_waited": (whole.stalled_s - short.stalled_s) / seconds,
        "short_s": short.seconds,
        "expert_hits": whole.hits / whole.pairs if whole.pairs else 0.0,
        "host_computed": (whole.host_s - short.host_s) / seconds,
    }


def write(row: Row, folder: Path) -> Path:
    """The model. In a process of its own: what it takes on the GPU and in RAM goes with it."""
    code = (
        "import json, pathlib, sys; from benchmarks.random_checkpoints import write_awq, write_q4_k;"
        " row = json.loads(sys.argv[1]); path = pathlib.Path(sys.argv[2]);"
        " write_awq(row['config'], path) if row['stored'] == 'awq' else write_q4_k(row['config'], path, row['skew'])"
    )
    path = folder / "model.gguf" if row.stored == "q4_k" else folder
    about = json.dumps({"config": row.config, "stored": row.stored, "skew": row.skew})
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, about, str(path)], check=True, cwd=Path(__file__).parent.parent)
    print(json.dumps({"written_s": round(time.perf_counter() - begin, 1)}), flush=True)
    return path


def kept(name: str, models: Path) -> Path:
    """The model of this row in that folder, written unless it is there."""
    folder = models / name
    if not folder.exists():
        unfinished = models / f"{name}.unfinished"
        unfinished.mkdir(parents=True)
        write(ROWS[name], unfinished)
        unfinished.rename(folder)
    return folder / "model.gguf" if ROWS[name].stored == "q4_k" else folder


def llama(name: str, folder: Path, counts: list[int], models: Path, out: Path | None) -> None:
    """Its programs on this row's file, once for each number of layers whose experts its cores compute."""
    from holdfast.units import MIB, parse_bytes

    row, cores, most = ROWS[name], str(len(os.sched_getaffinity(0))), [0]
    model, budget_mib = str(kept(name, models)), parse_bytes(row.settings["vram"]) // MIB
    libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    found = []
    for count in counts:
        most[0], watcher = 0, watch_nvml(most)
        common = ["-m", model, "-ngl", "99", "-ncmoe", str(count), "-t", cores]

        def printed(program: str, *more: str, common: list[str] = common) -> str:
            command = [str(folder / program), *common, *more]
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | {"LD_LIBRARY_PATH": libraries}
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            return done.stdout

        batches = printed(
            "llama-batched-bench", "-c", "8192", "-b", "2048", "-ub", "512", "-npp", "128", "-ntg", "32",
            "-npl", "1,8,32", "--output-format", "jsonl",
        )  # fmt: skip
        prompts = printed("llama-bench", "-p", "512", "-n", "0", "-r", "2", "-o", "json")
        watcher.kill()
        line = {"engine": "llama.cpp", "row": name, "ncmoe": count, **read_llama(batches, prompts), "nvml_mib": most[0]}
        found.append(line | {"within_budget": most[0] <= budget_mib})
        say(found[-1], out)
    within = [line for line in found if line["within_budget"]] or found
    say({"row": name, "best_ncmoe": max(within, key=lambda line: line["decode_tok_per_s"]["1"])["ncmoe"]}, out)


def read_llama(batches: str, prompts: str) -> dict[str, Any]:
    """What llama-batched-bench and llama-bench printed; what is around the lines of JSON is passed over."""
    tests = [json.loads(line) for line in batches.splitlines() if line.startswith("{")]
    (prompt,) = json.loads(prompts)
    return {
        "decode_tok_per_s": {str(test["pl"]): round(test["speed_tg"], 2) for test in tests},
        "prompt_512_tok_per_s": round(prompt["avg_ts"], 2),
    }


def measure(name: str, models: Path | None, out: Path | None) -> None:
    from holdfast import LLM

    row, most = ROWS[name], [0]
    watcher, ram = watch_nvml(most), RamWatch()
    with tempfile.TemporaryDirectory() as folder:
        model, settings = Path(folder), row.settings
        if row.stored is None:
            (model / "config.json").write_text(json.dumps(row.config))
            settings = settings | {"load_format": "dummy"}
        elif models is not None:
            model = kept(name, models)
        else:
            model = write(row, model)
        begin, host, stages = time.perf_counter(), HostDecided(), Stages()
        llm = LLM(str(model), skip_tokenizer_init=True, enable_prefix_caching=False, **settings)
        ready_s = time.perf_counter() - begin
        told = ("streamed", "pinned", "layers_on_disk", "link_copy", "nvme_read", "kv_pool", "cpu_", "expe", "host_")
        lines = [line for line in llm.info.decisions if line.startswith(told)]
        memory = llm.info.memory
        terms = {} if memory is None else {one.term: (one.planned_bytes, one.measured_bytes) for one in memory.terms}
        ready = {"row": name, "ready_s": ready_s, "stages_s": stages.seconds(), "decisions": lines, "terms": terms}
        ready |= {"nvml_mib": most[0], **ram.told(), "ram_allowed_mib": ram_allowed(llm, settings.get("ram")) >> 20}
        say(ready, out)
        run(llm, 1, 16, 2)
        if any(line.startswith(("cpu_compute = auto", "cpu_compute = MLPs")) for line in lines):
            say({"row": name, "cpu_compute": host.wait()}, out)
        for prompt in row.prompts:
            run(llm, 1, prompt, 1)
            seconds = min(run(llm, 1, prompt, 1).seconds for _ in range(3))
            found = {"prompt": prompt, "tok_per_s": round(prompt / seconds), "nvml_mib": most[0]}
            say({"row": name, **found}, out)
        for sequences, prompt, output in row.batches:
            short = run(llm, sequences, prompt, SHORT_TOKENS)
            batch = figures(sequences, output, run(llm, sequences, prompt, output), short)
            rounded = {key: round(value, 3) for key, value in batch.items()}
            say({"row": name, "batch": sequences, **rounded, "nvml_mib": most[0], **ram.told()}, out)
        llm.close()
    watcher.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--llama", type=Path, metavar="FOLDER")
    parser.add_argument("--ncmoe", type=lambda text: [int(one) for one in text.split(",")], default=[30])
    parser.add_argument("rows", nargs="+", choices=sorted(ROWS), metavar="ROW")
    asked = parser.parse_args()
    if asked.write:
        for row in asked.rows:
            kept(row, asked.models)
    elif asked.llama is not None:
        for row in asked.rows:
            if ROWS[row].stored != "q4_k" or asked.models is None:
                parser.error("--llama reads a row's GGUF file, which --models FOLDER keeps")
            llama(row, asked.llama, asked.ncmoe, asked.models, asked.out)
    elif len(asked.rows) == 1:
        measure(asked.rows[0], asked.models, asked.out)
    else:
        models = [] if asked.models is None else ["--models", str(asked.models)]
        out = [] if asked.out is None else ["--out", str(asked.out)]
        for row in asked.rows:
            subprocess.run([sys.executable, __file__, *models, *out, row], check=True)


if __name__ == "__main__":
    main()
