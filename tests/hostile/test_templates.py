"""Templates of clients that want to hold the server: others never notice, and nothing of them is left behind.

A real server, with `/health` and a stream watched meanwhile; the processes that run such templates; and templates made
at random of everything that can be reached, each operation of which must be short.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from deadlines import PATIENCE_S

from holdfast.errors import OverloadedError, RequestError
from holdfast.server.http.errors import HttpFailure
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.text.templates.jobs import RenderJob
from holdfast.text.templates.worker import MEMORY_BYTES

HELD_S = 2.0
"""The most that the front may be busy itself while somebody waits for /health: of its processor time, since every wait
is longer on a busy machine. Measured: some hundredths of a second; a template that holds the front does so for 6 s."""
OPERATION_CPU_S = 0.1
"""Of one operation, of processor time. Measured here: at most 0.04."""
LEFT_BYTES = 48 << 20
"""That a process may have more than before, once all is over: allocators keep some."""
FUZZ = Path(__file__).parents[1] / "support" / "template_fuzz.py"

LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
ENDLESS = "{% set s = 'a' * 900000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(x=FROM) %}{% for i in range(60) %}{% set ns.x = INTO %}{% endfor %}{{ ns.x | string }}"
BIG = "{% set n = 0x" + "f" * 1000 + " %}"
TEMPLATES = {
    "floor division": BIG + "{% for i in range(90000) %}{{ n ** 1 // 3 % 7 }}{% endfor %}" + "{{ n * n }}",
    "modulo": "{{ (10 ** 99999) % 7 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "growing product": GROW.replace("FROM", "3").replace("INTO", "ns.x * ns.x"),
    "hexadecimal literal": "{{ 0x" + "f" * 190_000 + " // 3 }}",
    "decimal literal": "{{ " + "9" * 190_000 + " }}",
    "round": "{{ 1 | round(9999999) }}",
    "int of text": "{{ ('f' * 900000) | int(0, 16) }}",
    "to_bytes": "{{ (1).to_bytes(99999999, 'big') }}",
    "odd text": "{{ '%999999999d' is odd }}",
    "title": "{{ ('a b ' * 200000) | title }}",
    "wordcount": "{{ ('a b ' * 200000) | wordcount }}",
    "striptags": "{{ ('<' * 900000) | striptags }}",
    "urlize": "{{ ('http://' * 100000) | urlize }}",
    "wordwrap": "{{ ('a' * 900000) | wordwrap(1) }}",
    "sort": "{{ (range(90000) | map('string') | list * 9) | sort }}",
    "unique": "{{ ('ab' * 400000) | unique | list }}",
    "groupby": "{{ ([{'a': 1}] * 400000) | groupby('a') }}",
    "dictsort": "{{ dict(range(90000) | map('string') | batch(2)) | dictsort | length }}",
    "tojson nested": GROW.replace("FROM", "[1]").replace("INTO", "[ns.x, ns.x]").replace("string", "tojson"),
    "replace": "{{ ('a' * 900000) | replace('a', 'b' * 900000) }}",
    "split": "{{ ('a' * 900000).split('a') | map('length') | list | sort }}",
    "rfind": "{{ ('a' * 900000).rfind('a' * 50000 + 'b' + 'a' * 50000) }}",
    "rsplit": "{{ ('a' * 450000).rsplit('a' * 50000 + 'b' + 'a' * 50000) }}",
    "translate": "{{ ('a' * 900000).translate({97: 'b' * 900000}) }}",
    "count": "{% for i in range(90000) %}{{ ('a' * 400000).count('a' * 5000 + 'b') }}{% endfor %}",
    "strip": "{{ ('a' * 900000).strip('b' * 900000 + 'a') }}",
    "in": "{% for i in range(90000) %}{{ ('a' * 5000 + 'b') in ('a' * 900000) }}{% endfor %}",
    "batch": "{{ ([1] * 900000) | batch(900000, 0) | list }}",
    "slice": "{{ ([1] * 900000) | slice(900000) | list }}",
    "map chain": "{{ ('ab' * 4000)" + " | map('upper')" * 9 + " | join | length * 'a' * 900000 }}",
    "center": "{{ 'a' | center(999999999) }}",
    "truncate": "{{ ('a' * 900000) | truncate(99999999) | length * 'a' * 999999 }}",
    "indent": "{{ ('a\n' * 400000) | indent(900000) }}",
    "format": "{{ '%999999999d' | format(1) }}",
    "format of many": "{{ ('{0}' * 300000).format('a' * 900000) }}",
    "xmlattr": "{{ {'a': 'b' * 900000} | xmlattr }}",
    "escape": "{{ ('<' * 900000) | e | e | e }}",
    "loop.length": "{% for a in ('a' * 90000) | map('upper') %}{{ loop.length }}{% endfor %}",
    "cycler": "{{ cycler(*('a' * 900000)).next() }}",
    "joiner": "{% set j = joiner('a' * 900000) %}{% for i in range(90000) %}{{ j() }}{% endfor %}",
    "dict": "{{ dict('ab' * 400000) }}",
    "range": "{{ range(10 ** 18) | list }}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for a in [1] * 900 recursive %}{{ loop([1] * 900) }}{% endfor %}",
    "set block": "{% set y %}{% for i in range(90000) %}{{ 'a' * 900000 }}{% endfor %}{% endset %}{{ y }}",
    "include": "{% include '/etc/passwd' %}",
    "deep parentheses": "{{ " + "(" * 90_000 + "1" + ")" * 90_000 + " }}",
    "long chain": "{{ a" + "|e" * 90_000 + " }}",
    "many tags": "{{a}}" * 39_000,
    "many branches": "".join(f"{{% if b %}}{{% set a{n} = 1 %}}{{% endif %}}" for n in range(5_000)),
    "unterminated": "{% raw %}" + "{% " * 60_000,
    "doubling": GROW.replace("FROM", "'a'").replace("INTO", "ns.x ~ ns.x"),
}
"""Each by itself would hold a thread, and every other with it, for seconds or without end, or take all memory."""


OWN = "{% if messages[-1].content == 'go' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
"""A model's own template that never ends for one message."""


@pytest.fixture(scope="module")
def server(
    module_server: Callable[..., Any], tiny_arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    own = tmp_path_factory.mktemp("template") / "own.jinja"
    own.write_text(OWN)
    arguments = ("--trust-request-chat-template", "--chat-template", str(own))
    return module_server(*tiny_arguments, *arguments).wait_ready()


class Watch:
    """Asks /health again and again, and follows streams one after another."""

    def __init__(self, server: Any) -> None:
        self._url = server.url
        self._front = psutil.Process(server.process.pid)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._ask_health, self._follow_streams)]
        self.held_s = 0.0
        self.events = 0
        self.problems: list[str] = []

    def _ask_health(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                began_s = self._busy_s()
                if client.get("/health").status_code != 200:
                    self.problems.append("/health")
                self.held_s = max(self.held_s, self._busy_s() - began_s)
                time.sleep(0.03)

    def _busy_s(self) -> float:
        times = self._front.cpu_times()
        return times.user + times.system

    def _follow_streams(self) -> None:
        body = {"prompt": "on", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        self.events += line.startswith("data: {")
                        if line.startswith('data: {"error"'):
                            self.problems.append(line)
                self._over.wait(0.2)  # An engine that computes all the time shows no more, and takes a core.

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        self.wait_for_events()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def wait_for_events(self, count: int = 5) -> None:
        """The stream goes on: it says more than it has said."""
        wanted, deadline_s = self.events + count, time.monotonic() + PATIENCE_S
        while self.events < wanted:
            assert time.monotonic() < deadline_s, "the stream stands still"
            time.sleep(0.005)


def chat(server: Any, template: str | None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **more}
    if template is not None:
        body["chat_template"] = template
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def workers_of(server: Any) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        try:
            if "holdfast.text.templates.worker" in child.cmdline():
                found.append(child)
        except psutil.Error:  # It has ended meanwhile.
            continue
    return found


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_others_do_not_notice(server: Any, every: int) -> None:
    """And memory comes back: of the front, which only passes such templates on, and of those that ran them."""
    assert chat(server, "{{ messages[0].content }}").status_code == 200
    front = psutil.Process(server.process.pid)
    before_bytes = front.memory_info().rss
    templates = dict(islice(TEMPLATES.items(), 0, None, every))
    with Watch(server) as watch, ThreadPoolExecutor(2) as pool:
        for name, answer in zip(
            templates, pool.map(lambda source: chat(server, source), templates.values()), strict=True
        ):
            code = answer.json()["error"].get("holdfast", {}).get("code") if answer.status_code == 400 else None
            assert code in ("HF301", "HF302", "HF310"), (name, answer.text[:300])
            watch.wait_for_events(1)
        answer = chat(server, "{{ messages[0].content }}")
        assert answer.status_code == 200
        watch.wait_for_events()
    assert not watch.problems
    assert watch.held_s < HELD_S
    assert len(workers_of(server)) <= 2
    wait_until(lambda: front.memory_info().rss < before_bytes + LEFT_BYTES, "the front keeps memory")
    assert all(worker.memory_info().rss < MEMORY_BYTES / 2 for worker in workers_of(server))


def test_a_template_that_never_ends_is_ended(server: Any) -> None:
    """A client's, in a process of its own, and the model's own, in a thread of the front."""
    with Watch(server) as watch, ThreadPoolExecutor(2) as pool:
        sent = pool.submit(chat, server, ENDLESS)
        own = pool.submit(chat, server, None, messages=[{"role": "user", "content": "go"}])
        for answer in (sent.result(), own.result()):
            assert answer.status_code == 400
            assert answer.json()["error"]["holdfast"]["code"] == "HF302"
            assert "s in one rendering" in answer.text or "more than 6 s" in answer.text
        assert chat(server, None).status_code == 200
    assert watch.held_s < HELD_S
    assert not watch.problems


def test_a_client_that_leaves_takes_its_process_with_it(server: Any) -> None:
    wait_until(lambda: len(workers_of(server)) <= 1, "workers of other tests")
    idle = {worker.pid for worker in workers_of(server)}
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": ENDLESS}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/tokenize", json=body, timeout=httpx.Timeout(PATIENCE_S, read=1.0))
    wait_until(lambda: not idle & {worker.pid for worker in workers_of(server)}, "it works on for nobody")


def test_tools_and_thoughts_are_found_in_a_clients_template_too(server: Any) -> None:
    """What has to be tried out for that runs where the template does."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
        "{# <tool_call> </tool_call> #}>"
    )
    shown = httpx.post(
        f"{server.url}/tokenize",
        json={"messages": [{"role": "user", "content": "hi"}], "tools": tools, "chat_template": source},
        timeout=PATIENCE_S,
    ).json()
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": shown["tokens"]}, timeout=PATIENCE_S).json()["prompt"]
    assert text == "[user]hi" + json.dumps(tools) + ">"
    # A template that shows no tools is given them in words, in its first message.
    plain = source.replace("{{ tools | tojson if tools }}", "")
    answer = chat(server, plain, tools=tools, tool_choice="required", max_tokens=300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    # And one that hangs only while it is found out.
    hanging = "{% if tools %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    assert chat(server, hanging, tools=tools).status_code == 200


# ---- the processes by themselves, where the sandbox does not help


def job(template: str = "{{ messages[0].content }}") -> RenderJob:
    return RenderJob(
        template=template,
        messages=[{"role": "user", "content": "hi"}],
        tools=None,
        talks_of_tools=False,
        tool_call_parser=None,
        add_generation_prompt=False,
        continue_final_message=False,
        documents=None,
        in_words=True,
        variables={},
    )


READY = "import sys, time; from holdfast.text.templates import worker as w; import socket; s = socket.socket(fileno=0);"
SAY_READY = READY + "w._limit_memory(); w._send(s, w.READY); w._receive(s);"
SILENT = ("-c", SAY_READY + "time.sleep(600)")


@contextmanager
def pool(*program: str, **options: Any) -> Iterator[TemplateWorkers]:
    workers = TemplateWorkers(program=program, **options) if program else TemplateWorkers(**options)
    try:
        yield workers
    finally:
        workers.close()


def processes(workers: TemplateWorkers) -> list[psutil.Process]:
    return [psutil.Process(worker.process.pid) for worker in workers._all]


async def test_a_worker_is_used_again_only_after_it_did_well() -> None:
    with pool() as workers:
        assert (await workers.render(job())).text == b"hi"
        first = processes(workers)
        assert (await workers.render(job())).text == b"hi"
        assert processes(workers) == first
        with pytest.raises(RequestError, match="failed: no"):
            await workers.render(job("{{ raise_exception('no') }}"))
        assert (await workers.render(job())).text == b"hi"
        assert not set(processes(workers)) & set(first)


async def test_a_worker_that_does_not_answer_is_killed() -> None:
    with pool(*SILENT, wall_s=0.3) as workers:
        with pytest.raises(RequestError, match=r"more than 0\.3 s") as caught:
            await workers.render(job())
        assert caught.value.code == "HF302"
        await until(lambda: not workers._all)


@pytest.mark.parametrize(
    "act", ["bytearray(2 << 30)", "import ctypes; ctypes.string_at(0)", "sys.exit(1)", "s.close()"]
)
async def test_a_worker_that_ends_is_an_answer_too(act: str) -> None:
    with pool("-c", SAY_READY + act) as workers:
        with pytest.raises(RequestError, match="its process died") as caught:
            await workers.render(job())
        assert caught.value.code == "HF302"


async def test_memory_is_limited() -> None:
    allocate = f"b = bytearray({MEMORY_BYTES} - (64 << 20)); del b;"
    within = SAY_READY + allocate + "w._send(s, b'[]'); time.sleep(600)"
    # What it answers is no answer, but it lived to give it.
    with pool("-c", within, wall_s=PATIENCE_S) as workers, pytest.raises(msgspec.ValidationError):
        await workers.render(job())
    beyond = SAY_READY + allocate.replace("- (64 << 20)", "+ 1") + "time.sleep(600)"
    with pool("-c", beyond, wall_s=PATIENCE_S) as workers, pytest.raises(RequestError, match="its process died"):
        await workers.render(job())


async def test_processor_time_is_limited_by_the_kernel_too() -> None:
    endless = SAY_READY.replace("w._receive(s);", "w.CPU_S = 0; w._limit_cpu(); w._receive(s);") + "\nwhile True: pass"
    with pool("-c", endless, wall_s=PATIENCE_S) as workers, pytest.raises(RequestError, match="its process died"):
        await workers.render(job())


async def test_a_program_that_does_not_start_is_not_the_clients_fault() -> None:
    with pool("-c", "raise SystemExit('no')") as workers:
        with pytest.raises(HttpFailure) as caught:
            await workers.render(job())
        assert caught.value.status == 503


async def test_few_wait_and_whoever_leaves_frees_the_place() -> None:
    with pool(*SILENT, most_workers=1, most_waiting=1, wall_s=PATIENCE_S) as workers:
        working = asyncio.create_task(workers.render(job()))
        waiting = asyncio.create_task(workers.render(job()))
        await until(lambda: workers._waiting == 1)
        with pytest.raises(OverloadedError) as caught:
            await workers.render(job())
        assert caught.value.field == "chat_template"
        (process,) = processes(workers)
        working.cancel()
        await until(lambda: not process.is_running() and len(workers._all) == 1 and workers._waiting == 0)
        waiting.cancel()
        await until(lambda: not workers._all)


STARTER = """
import asyncio, sys
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.text.templates.jobs import decode_job

async def main():
    unlimited = "import sys; from holdfast.text.templates import budget, worker; budget.MAX_CPU_S = 1e9;"
    workers = TemplateWorkers(program=("-c", unlimited + "worker.CPU_S = 10**6; worker.main(int(sys.argv[1]))"))
    working = [asyncio.create_task(workers.render(decode_job(sys.argv[1].encode()))) for _ in range(2)]
    while len(workers._all) < 2 or not all(worker._streams for worker in workers._all):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(*(worker.process.pid for worker in workers._all), flush=True)
    await asyncio.gather(*working)

asyncio.run(main())
"""


def test_workers_end_with_the_process_that_started_them() -> None:
    """Also in the middle of their work, when they hear nothing."""
    command = [sys.executable, "-c", STARTER, msgspec.json.encode(job(ENDLESS)).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive


async def test_a_worker_sees_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", "secret")
    with open(os.devnull) as held, pool() as workers:
        os.set_inheritable(held.fileno(), True)
        await workers.render(job())
        (process,) = processes(workers)
        assert "secret" not in process.environ().values()
        assert process.open_files() == []
        names = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
        assert len([name for name in names if name.startswith("socket:")]) == 1
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()


async def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


# ---- everything that can be reached, with operands of all kinds


def fuzz(*arguments: object, timeout_s: float) -> dict[str, Any]:
    """In a process with little memory: a fault there is a failure here, with the template that caused it."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["slowest"][0][0] < OPERATION_CPU_S, found["slowest"]
    assert found["endings"].keys() <= {"text", "HF301", "HF302"}
    return found


def test_every_operation_is_short() -> None:
    found = fuzz("sweep", 0, 400, timeout_s=PATIENCE_S)
    assert len(found["endings"]) == 3, "too much is refused to show anything"


def test_templates_made_at_random() -> None:
    found = fuzz(1, 25, timeout_s=PATIENCE_S)
    assert sum(found["endings"].values()) == 25


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_every_operation_is_short_with_every_operand(part: int) -> None:
    fuzz("sweep", part, 5, timeout_s=1800)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_templates_made_at_random() -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    fuzz(seed, 4000, timeout_s=1800)
