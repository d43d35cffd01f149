"""A real model over VRAM, RAM and a disk, in float32: the tokens of one that stays on the GPU. And a server with layers
in RAM as people start it: streams go on while its budget changes, and whatever ends it, nothing stays pinned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port
from named_model import MODEL_VARIABLE, named_models, why_not
from three_tiers import three_tiers

from holdfast import LLM, SamplingParams
from holdfast.hardware import memory
from holdfast.planner.serve import streamed
from holdfast.units import GIB, MIB

PROMPTS = ["def fibonacci(n):", "The capital of France is", "A list of ten colours:\n", "import"]
PATIENCE_S = 240.0


@pytest.mark.parametrize("name", named_models())
def test_a_real_model_in_three_tiers_says_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (problem := why_not(name)) is not None:
        pytest.skip(problem)
    monkeypatch.setattr(streamed, "IN_MEMORY", ())
    settings: dict[str, Any] = {
        "model": name, "device": "cuda", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4,
        "max_num_batched_tokens": 256, "cpu_compute": "off",
    }  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

    def answers(**more: Any) -> tuple[list[list[int]], Any]:
        with LLM(**settings | more) as llm:
            found = llm.generate(PROMPTS, greedy, use_tqdm=False)
            return [list(one.outputs[0].token_ids) for one in found], llm.info

    plain, info = answers(vram=8 * GIB)
    assert info.memory.below == []
    tiers = three_tiers(settings, str(tmp_path))
    found, info = answers(**tiers)
    lines = [
        line for line in info.decisions if line.startswith(("streamed", "layers_on_disk", "pinned", "link", "nvme"))
    ]
    print("\n".join([f"vram {tiers['vram'] // MIB} MiB, ram {tiers['ram'] // MIB} MiB", *lines]))
    assert [tier.tier for tier in info.memory.below] == ["ram", "nvme"]
    assert all(term.measured_bytes for tier in info.memory.below for term in tier.terms if term.term == "weights")
    assert found == plain


@pytest.mark.parametrize("name", named_models())
def test_layers_and_kv_pages_on_one_disk_change_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (problem := why_not(name)) is not None:
        pytest.skip(problem)
    monkeypatch.setattr(streamed, "IN_MEMORY", ())
    store: dict[str, Any] = {"kv_store": str(tmp_path / "kv"), "kv_store_size": GIB, "kv_ram": 0}
    settings: dict[str, Any] = {
        "model": name, "device": "cuda", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4,
        "max_num_batched_tokens": 256, "cpu_compute": "off",
    }  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [f"{one} {', '.join(map(str, range(150 + 20 * at)))}" for at, one in enumerate(PROMPTS)]

    def answers(llm: LLM) -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy, use_tqdm=False)]

    with LLM(**settings, vram=8 * GIB) as llm:
        plain = answers(llm)
    tiers = three_tiers(settings | store, str(tmp_path))
    for life in range(2):
        with LLM(**tiers) as llm:
            assert any(one.startswith("kv_store") and "behind the layers" in one for one in llm.info.decisions)
            for _ in range(2):  # What is asked twice is written.
                assert answers(llm) == plain
            stats = llm.get_stats()
            (disk,) = [one for one in stats.kv_tiers if one.tier == "disk"]
            assert stats.kv_store is not None
            print(f"life {life}: {disk.hit_tokens_total} tokens from the disk, waited {stats.kv_store.waited_s_by_use}")
            assert (disk.hit_tokens_total > 0) == (life > 0)


class Server:
    """`holdfast serve` as people start it."""

    def __init__(self, *arguments: str) -> None:
        self.port, self._log = free_port(), tempfile.TemporaryFile("w+")  # noqa: SIM115 (it ends with this)
        # Which model tests take is no setting of Holdfast, and is refused as one.
        environment = {name: value for name, value in os.environ.items() if name != MODEL_VARIABLE}
        # A session of its own: all of it can be killed.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", *arguments, "--port", str(self.port)],
            env=environment, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def wait(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.end()
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server is not ready")

    @property
    def engine(self) -> int:
        (found,) = [one["pid"] for one in self.http.get("/memory").json()["processes"] if one["name"] == "engine"]
        return int(found)

    def answer(self, number: int, tokens: int = 40) -> list[int]:
        body = {
            "prompt": [number + 3 * place for place in range(3, 20)], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        found = list[int]()
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    found += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
        return found

    def end(self) -> str:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.http.close()
        self.process.wait()
        self._log.seek(0)
        return self._log.read()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started = list[Server]()

    def start(*arguments: str) -> Server:
        started.append(Server(*arguments))
        started[-1].wait()
        return started[-1]

    yield start
    for server in started:
        print(server.end()[-4000:])


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(query, text=True).split()[0])


def until(reached: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not (found := reached()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


ARGUMENTS = (
    "--device", "cuda", "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len",
    "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--cpu-compute", "off",
    "--no-enable-prefix-caching",
)  # fmt: skip


def test_a_server_streams_takes_other_budgets_and_leaves_nothing(
    shape: Callable[[str], str], serve: Callable[..., Server]
) -> None:
    folder = shape("1B")
    stays = serve(folder, *ARGUMENTS, "--vram", "10GiB")
    assert stays.http.get("/memory").json()["links"] == []
    expected = [stays.answer(number) for number in range(4)]
    stays.end()
    before_ram, before_mib = memory().available_bytes, used_mib()
    server = serve(folder, *ARGUMENTS, "--vram", "4GiB")
    links = {one["link"]: one for one in server.http.get("/memory").json()["links"]}
    assert links["ram-vram"]["possible_bytes_per_s"] > 1e9
    pinned = before_ram - memory().available_bytes
    assert pinned > GIB
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.answer, number) for number in range(4)]
        for budget in ("6GiB", "3GiB", "8GiB", "4GiB"):
            time.sleep(0.3)
            changed = server.http.post("/memory", json={"vram": budget})
            assert changed.status_code == 200, changed.text
            tier = changed.json()["tiers"][0]
            assert tier["measured_bytes"] <= tier["budget_bytes"] + 16 * MIB
        assert [one.result() for one in running] == expected
    assert [server.answer(number) for number in range(4)] == expected
    # In the middle of a step, both processes at once.
    with ThreadPoolExecutor(1) as pool:
        dropped = pool.submit(server.answer, 1, 900)
        time.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            dropped.result()
    assert until(lambda: memory().available_bytes > before_ram - pinned // 8, 20.0), "pinned memory stays"
    assert until(lambda: used_mib() < before_mib + 64, 20.0), "VRAM stays"


def test_a_server_whose_disk_is_lost_says_so(shape: Callable[[str], str], serve: Callable[..., Server]) -> None:
    """First what was written, which is then written anew and answers go on; then the folder too."""
    folder, disk = shape("1B"), Path(tempfile.mkdtemp(dir="/var/tmp"))  # Not in memory, as /tmp may be.
    settings = {
        "model": folder, "load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True, "dtype": "float32",
        "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256, "cpu_compute": "off",
    }  # fmt: skip
    tiers = three_tiers(settings, str(disk))
    sizes = "--vram", str(tiers["vram"]), "--ram", str(tiers["ram"]), "--nvme-path", str(disk)
    server = serve(folder, *ARGUMENTS, *sizes)
    assert [tier["tier"] for tier in server.http.get("/memory").json()["tiers"]] == ["vram", "ram", "nvme"]
    expected = server.answer(1)
    lose_layers(server.engine, disk)
    assert server.answer(1) == expected
    lose_layers(server.engine, disk)
    disk.rmdir()
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    failed = server.http.post("/v1/completions", json=body)
    assert failed.status_code == 503, failed.text
    assert failed.json()["error"]["holdfast"]["code"] == "HF443", failed.text


def lose_layers(pid: int, folder: Path) -> None:
    """Reads find the end of the file from now on."""
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(opened).startswith(str(folder)):
            os.truncate(opened, 0)
            return
    raise AssertionError("the engine process has no file there")
