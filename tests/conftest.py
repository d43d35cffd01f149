"""Shared by all tests: real servers in processes of their own, the built-in model, and small models in real shapes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import httpx
import hypothesis
import psutil
import pytest
from deadlines import PATIENCE_S
from forked_servers import ENGINE_NAME, REAL_POPEN, ForkedPopen
from free_ports import free_port
from httpx._transports import default as httpx_transport
from lean_pytest import keep_reruns_here, rewrite_a_share, seed_torch

from holdfast.hardware.nvidia import probe

if not probe().gpus:
    # Before anything imports Triton: kernels are tested in its interpreter where there is no GPU.
    os.environ["TRITON_INTERPRET"] = "1"

# Threads of torch wait asleep for each other. Awake, they hold the cores that the tests beside them need, and tests of
# tiny models take twice the time. Processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Servers of the tests are not listed among those of whoever runs them, nor the other way round.
os.environ["HOLDFAST_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="hf-servers-")
atexit.register(shutil.rmtree, os.environ["HOLDFAST_RUNTIME_DIR"], ignore_errors=True)

# Under nohup, or in the background of a script, these are ignored, and so they would be by every program that the tests
# start and end by them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A client reads all certificates of the world when it is made, 50 ms of computing; hundreds are made here.
httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)

# The same examples at every run: what fails, failed by a change. Long runs draw others (pytest_configure below).
hypothesis.settings.register_profile(
    "same",
    max_examples=35,  # tests/support/examples.py says why so few.
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "others", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)


def pytest_configure(config: pytest.Config) -> None:
    """Before test files are read, whose own settings build on these."""
    short = "not long" in config.getoption("markexpr")
    hypothesis.settings.load_profile("same" if short else "others")
    if short:
        os.environ.setdefault("KERNEL_SEED", "1")  # Tests of kernels draw fresh numbers without it.


def pytest_sessionstart(session: pytest.Session) -> None:
    keep_reruns_here(session.config)
    rewrite_a_share(session.config, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: a collection of garbage need not look through it again and again, in every process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


WAITING = ("e2e", "faults", "hostile")
"""Folders whose tests wait for processes and limits, for much of their time."""
DEAR = (
    "unit/checkpoints/test_remote.py", "unit/doctor_rescue/test_judge_command.py",
    "unit/engine/test_plan_before_loading.py", "unit/planner/test_commands.py", "unit/planner/test_one_planner.py",
    "unit/planner/test_ways_out.py", "unit/project/test_house_rules.py", "unit/scheduler/test_simulated_time.py",
)  # fmt: skip
"""Files of tests/unit that take ten seconds or nearly."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order in which workers take files: those that wait spread among those that compute, so that neither cores nor
    workers are idle, then the many short ones of tests/unit, so that all workers end together."""
    if not hasattr(config, "workerinput"):
        return
    rooms: dict[str, dict[Path, None]] = {"waiting": {}, "computing": {}, "dear": {}, "unit": {}}
    for item in items:
        rooms[_room(item.path)][item.path] = None
    places = {
        path: (room == "unit", (number + 0.5) / len(files))
        for room, files in rooms.items()
        for number, path in enumerate(files)
    }
    items.sort(key=lambda item: places[item.path])


def _room(path: Path) -> str:
    name = path.relative_to(Path(__file__).parent).as_posix()
    folder = name.partition("/")[0]
    if folder != "unit":
        return "waiting" if folder in WAITING else "computing"
    return "dear" if name in DEAR else "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Numbers that a test draws are its own, whatever ran before it in its process."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        seed_torch(sys.modules["torch"], seed)


MOST_SECOND_TRIES = 5
"""In one run: more are no accident."""


def _second_tries(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """What failed, and passed when it ran once more (scripts/check.sh)."""
    failed = {report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, ())}
    return [report for report in reporter.stats.get("rerun", ()) if report.nodeid not in failed]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    if len({report.nodeid for report in _second_tries(reporter)}) > MOST_SECOND_TRIES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With their failures: the summary counts them among the passed."""
    if passed := _second_tries(terminalreporter):
        terminalreporter.section(f"failed, and passed when run once more ({MOST_SECOND_TRIES} tests at most may)")
        for report in passed:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})", yellow=True)
            terminalreporter.write_line(report.longreprtext)


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
"""The built-in model's vocabulary, so that its tokenizer goes with it; small enough to step in about a millisecond."""


class RunningServer:
    """`holdfast serve`. Everything it says is in `log`."""

    def __init__(
        self, folder: Path, *arguments: str, environment: dict[str, str] | None = None, forked: bool = False
    ) -> None:
        """`forked`: without what every start imports (tests/support/forked_servers.py)."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [*arguments]
        key = words[words.index("--api-key") + 1] if "--api-key" in words else None
        self._key = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._log_path = folder / f"server-{self.port}.log"
        with self._log_path.open("w") as log:
            self.process = (ForkedPopen if forked else REAL_POPEN)(
                [sys.executable, "-m", "holdfast", "serve", *arguments, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def engine_pid(self) -> int:
        """The child that holds the model."""
        return self._engines()[0].pid

    def _engines(self) -> list[psutil.Process]:
        found = [
            child
            for child in psutil.Process(self.process.pid).children()
            if child.name() == ENGINE_NAME or "holdfast.engine.process.entry" in " ".join(child.cmdline())
        ]
        assert found, "there is no engine process"
        return found

    def kill_engine(self) -> bool:
        """Whether it was computing an answer: one that takes no second may be over before it is killed."""
        with self.engine_held():
            running = self.open_requests() > 0
            os.kill(self.engine_pid, signal.SIGKILL)
        return running

    @contextlib.contextmanager
    def engine_held(self) -> Iterator[None]:
        """Engine processes stand still meanwhile: what they have begun does not end, however slow the test is."""
        engines = self._engines()
        for engine in engines:
            engine.suspend()
        try:
            yield
        finally:
            for engine in engines:
                with contextlib.suppress(psutil.NoSuchProcess):  # It was killed meanwhile.
                    engine.resume()

    def wait_ready(self, timeout_s: float = 2 * PATIENCE_S) -> RunningServer:
        """A start computes for seconds, which are minutes on a machine with ten times more to do than it can."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            # A client that finds nobody there costs a hundred times what a socket does.
            with contextlib.suppress(OSError, httpx.TransportError):
                socket.create_connection(("127.0.0.1", self.port), timeout_s).close()
                if httpx.get(f"{self.url}/health", timeout=timeout_s).status_code == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready in {timeout_s} s:\n{self.log}")

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Several of the same moment."""
        page = httpx.get(f"{self.url}/metrics", headers=self._key, timeout=PATIENCE_S)
        assert page.status_code == 200, page.text
        found = dict.fromkeys(names, 0.0)
        for line in page.text.splitlines():
            if (name := line.partition(" ")[0].partition("{")[0]) in found:
                found[name] += float(line.rsplit(" ", 1)[1])
        return [found[name] for name in names]

    def open_requests(self) -> int:
        """Taken and not yet answered: known to the front, also while the engine stands still."""
        return int(httpx.get(f"{self.url}/load", headers=self._key, timeout=PATIENCE_S).json()["server_load"])

    def wait_metric(self, name: str, good: Callable[[float], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not good(found := self.metric(name)):
            assert time.monotonic() < deadline, f"{name} stayed at {found}"
            time.sleep(0.05)

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """Ends it in order and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and no weights, for load_format=dummy."""
    folder = tmp_path_factory.mktemp("tiny-model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_arguments(tiny_model: Path) -> list[str]:
    """Dummy weights, a real tokenizer, one thread: for tests of the house, not of the model."""
    return [
        str(tiny_model),
        "--load-format",
        "dummy",
        "--tokenizer",
        "smollm2",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "64MiB",
        "--served-model-name",
        "tiny",
    ]


@pytest.fixture(scope="session")
def endless_arguments(tiny_arguments: list[str]) -> list[str]:
    """The same with room for answers of 60,000 tokens, which take a minute: what shall happen in the middle of one
    does, also where the tests or the front get no processor for seconds."""
    return [*tiny_arguments, "--hf-overrides", '{"max_position_embeddings": 65536}', "--max-model-len", "65536"]


FORKED = sys.platform == "linux" and not probe().gpus
"""Whether servers are, unless a test wants one as a user starts it."""


@pytest.fixture(scope="module")
def forked_starts() -> Iterator[None]:
    """All that a file's tests start of Holdfast is forked (tests/support/forked_servers.py)."""
    with pytest.MonkeyPatch.context() as patch:
        if FORKED:
            patch.setattr(subprocess, "Popen", ForkedPopen)
        yield


def _starter(folder: Path) -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, forked: bool = FORKED) -> RunningServer:
        servers.append(RunningServer(folder, *arguments, environment=environment, forked=forked))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with the given flags and ends them when the test does."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """The same, for servers that the tests of one file share."""
    yield from _starter(tmp_path_factory.mktemp("servers"))
