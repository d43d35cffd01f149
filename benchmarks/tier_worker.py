"""One engine on one row of `tiers.py`, in a process of its own: `python benchmarks/tier_worker.py ENGINE WORK.json`.

ENGINE: holdfast, vllm or llama.cpp. Prints a line of JSON for each batch, and for each prompt that is measured by
itself, as it is measured. Figures of decoding are the difference of a long run and a short one with the same prompts,
so that prompts are not in them; of llama.cpp they are those of its programs. The most that NVML saw in use is sampled
five times a second throughout, other processes included, and so is Holdfast's RAM (RssAnon and RssShmem, in which
pinned memory is; and by how much less the system could give than at the start). Owns no row, and writes no model.
Imports nothing of the engines that it is not asked for.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
SHORT_TOKENS = 4
"""Of answers in the short run."""
NVML_PERIOD_MS = 200
HOST_S = 120
"""That the host may take until it is decided what it computes."""
VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}  # fmt: skip
"""vLLM 0.26's newer runner accepts the settings that offload weights, and does not apply them."""


class Work(NamedTuple):
    model: str
    """A file or folder, which holds nothing but a config where weights are dummies."""
    dummies: bool
    settings: dict[str, Any]
    """Of the engine; of llama.cpp, flags of its programs."""
    batches: list[tuple[int, int, int]]
    """Sequences, tokens of each prompt, tokens of each answer."""
    prompts: list[int]
    programs: str = ""
    """The folder of llama.cpp's."""


class NvmlWatch:
    """The most MiB that are in use on the first GPU, by anybody."""

    def __init__(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(NVML_PERIOD_MS)]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        samples = self._process.stdout
        assert samples is not None
        self.most = int(samples.readline())

        def read() -> None:
            for line in samples:
                self.most = max(self.most, int(line))

        threading.Thread(target=read, daemon=True).start()

    def told(self) -> dict[str, int]:
        return {"nvml_mib": self.most}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


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


def ask(module: Any, llm: Any, sequences: int, prompt: int, output: int) -> float:
    """Seconds until all have answered, of holdfast or vLLM alike."""
    draw = random.Random(sequences)
    prompts = [[draw.randint(0, 120000) for _ in range(prompt)] for _ in range(sequences)]
    params = module.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output, detokenize=False)
    begin = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
    return seconds


def run(llm: Any, sequences: int, prompt: int, output: int) -> Run:
    import holdfast
    from holdfast.records import ExpertUse

    before = llm.get_stats()
    seconds = ask(holdfast, llm, sequences, prompt, output)
    after = llm.get_stats()
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


def figures(sequences: int, output: int, whole: Run, short: Run, possible: float) -> dict[str, float]:
    """Of a batch: with its prompts, and of decoding alone. `possible`: bytes a second of the link alone.
    `link_bound`: seconds that a step's bytes take over the link alone, of the seconds of a step."""
    seconds, steps = whole.seconds - short.seconds, whole.steps - short.steps
    copied, busy_s = whole.copied_bytes - short.copied_bytes, whole.busy_s - short.busy_s
    return {
        "tok_per_s": sequences * output / whole.seconds,
        "decode_tok_per_s": sequences * (output - SHORT_TOKENS) / seconds,
        "step_s": seconds / steps,
        "gb_per_step": copied / steps / 1e9,
        "link_gb_per_s": copied / seconds / 1e9,
        "link_busy": busy_s / seconds,
        "link_bound": copied / possible / seconds if possible else 0.0,
        "gpu_waited": (whole.stalled_s - short.stalled_s) / seconds,
        "short_s": short.seconds,
        "expert_hits": whole.hits / whole.pairs if whole.pairs else 0.0,
        "host_computed": (whole.host_s - short.host_s) / seconds,
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def holdfast(work: Work) -> Iterator[Line]:
    from holdfast import LLM

    nvml, ram = NvmlWatch(), RamWatch()
    begin, host, stages = time.perf_counter(), HostDecided(), Stages()
    dummies = {"load_format": "dummy"} if work.dummies else {}
    llm = LLM(work.model, skip_tokenizer_init=True, enable_prefix_caching=False, **dummies, **work.settings)
    ready_s = time.perf_counter() - begin
    told = ("streamed", "pinned", "layers_on_disk", "link_copy", "nvme_read", "kv_pool", "cpu_", "expe", "host_")
    lines = [line for line in llm.info.decisions if line.startswith(told)]
    memory = llm.info.memory
    terms = {} if memory is None else {one.term: (one.planned_bytes, one.measured_bytes) for one in memory.terms}
    allowed_mib = ram_allowed(llm, work.settings.get("ram")) >> 20
    ready = {"ready_s": round(ready_s, 2), "stages_s": stages.seconds(), "decisions": lines, "terms": terms}
    yield ready | nvml.told() | ram.told() | {"ram_allowed_mib": allowed_mib}
    run(llm, 1, 16, 2)
    if any(line.startswith(("cpu_compute = auto", "cpu_compute = MLPs")) for line in lines):
        yield {"cpu_compute": host.wait()}
    for prompt in work.prompts:
        run(llm, 1, prompt, 1)
        best = min((run(llm, 1, prompt, 1) for _ in range(3)), key=lambda one: one.seconds)
        found = {"tok_per_s": prompt / best.seconds, "gb": best.copied_bytes / 1e9}
        yield {"prompt": prompt} | rounded(found) | nvml.told()
    for sequences, prompt, output in work.batches:
        short = run(llm, sequences, prompt, SHORT_TOKENS)
        whole = run(llm, sequences, prompt, output)
        found = figures(sequences, output, whole, short, llm.get_stats().links[0].possible_bytes_per_s)
        yield {"batch": sequences} | rounded(found) | nvml.told() | ram.told()
    llm.close()
    nvml.end()


def vllm(work: Work) -> Iterator[Line]:
    """Its share of the GPU is what `vram_gib` of the settings is of all that there is."""
    os.environ |= VLLM_ENVIRONMENT
    import vllm as module

    nvml, settings = NvmlWatch(), dict(work.settings)
    asked = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"  # No CUDA context in this process.
    total_gib = int(subprocess.check_output([sys.executable, "-c", asked])) / 2**30
    begin = time.perf_counter()
    llm = module.LLM(
        model=work.model, load_format="dummy" if work.dummies else "auto", skip_tokenizer_init=True,
        enable_prefix_caching=False, gpu_memory_utilization=settings.pop("vram_gib") / total_gib, **settings,
    )  # fmt: skip
    yield {"version": module.__version__, "ready_s": round(time.perf_counter() - begin, 1)} | nvml.told()
    ask(module, llm, 1, 16, 2)
    for sequences, prompt, output in work.batches:
        short_s = ask(module, llm, sequences, prompt, SHORT_TOKENS)
        whole_s = ask(module, llm, sequences, prompt, output)
        decode = sequences * (output - SHORT_TOKENS) / (whole_s - short_s)
        found = {"tok_per_s": sequences * output / whole_s, "decode_tok_per_s": decode, "short_s": short_s}
        yield {"batch": sequences} | rounded(found) | nvml.told()
    nvml.end()


def llama(work: Work) -> Iterator[Line]:
    nvml, folder, cores = NvmlWatch(), Path(work.programs), len(os.sched_getaffinity(0))
    where = [word for flag, value in work.settings.items() for word in (f"-{flag}", str(value))]
    common = ["-m", work.model, "-t", str(cores), *where]
    wanted = [sequences for sequences, _, _ in work.batches]
    # The program may end before it has written its last line: there is one more, of which nothing is wanted.
    counts = ",".join(map(str, [*wanted, 1]))
    _, prompt, output = work.batches[0]
    batched = [
        "-c", "8192", "-b", "2048", "-ub", "512", "-npp", str(prompt), "-ntg", str(output), "-npl", counts,
        "--output-format", "jsonl",
    ]  # fmt: skip
    for text in printed([str(folder / "llama-batched-bench"), *common, *batched], folder):
        found = read_batched_bench(text)
        if found is not None and found["batch"] in wanted:
            wanted.remove(found["batch"])
            yield found | nvml.told()
    if wanted:
        raise SystemExit(f"llama-batched-bench printed nothing of {wanted} sequences")
    for prompt in work.prompts:
        single = ["-p", str(prompt), "-n", "0", "-r", "2", "-o", "json"]
        yield read_bench("".join(printed([str(folder / "llama-bench"), *common, *single], folder))) | nvml.told()
    nvml.end()


def printed(command: list[str], folder: Path) -> Iterator[str]:
    """Line by line, as it comes."""
    libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | {"LD_LIBRARY_PATH": libraries}
        )
        assert process.stdout is not None
        yield from process.stdout
        if process.wait():
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.read()[-2000:]}")


def read_batched_bench(line: str) -> Line | None:
    """None: it is around the lines of JSON."""
    if not line.startswith("{"):
        return None
    test = json.loads(line)
    found = {"tok_per_s": test["pl"] * test["tg"] / test["t"], "decode_tok_per_s": test["speed_tg"]}
    return {"batch": test["pl"]} | rounded(found)


def read_bench(text: str) -> Line:
    (test,) = json.loads(text)
    return {"prompt": test["n_prompt"]} | rounded({"tok_per_s": test["avg_ts"]})


ENGINES = {"holdfast": holdfast, "vllm": vllm, "llama.cpp": llama}


def main(engine: str, work: str) -> None:
    for line in ENGINES[engine](Work(**json.loads(Path(work).read_text()))):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
