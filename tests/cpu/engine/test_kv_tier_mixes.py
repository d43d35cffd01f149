"""KV tiers in every mix: full, windowed and hybrid layers and FP8 pages, below which RAM, a disk or both lie, while the
pool is so small that requests are preempted, is resized, sleeps, or is another process's. Base model and two adapters
with the same prompts, grammars, scores, vectors and tenants side by side: all is as it is without tiers.

TIER_SEED draws what another run drew.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest
import torch
import transformers
from deadlines import PATIENCE_S
from examples import in_quick_run
from late_tiers import AsGpu, disk_places, pinned
from lora_adapters import write_adapter
from simulated_copies import SimulatedCopies

from holdfast.checkpoints.lora.adapter import stamp
from holdfast.config import EngineConfig
from holdfast.engine.core.kept_kv import KVKeeper
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.engine.startup.build import build_core, find_model
from holdfast.execution.tiers.cpu import CpuPageCopies
from holdfast.execution.tiers.gpu import GpuPageCopies, HostMemory
from holdfast.kvcache import KVCache, Tier, TierLimits
from holdfast.kvcache.host_pages import HostPages
from holdfast.prefix_store import PrefixStore
from holdfast.records import AdapterRef, Request, SamplingParams, StructuredOutputsParams
from holdfast.records.structured import Vocabulary
from holdfast.scheduler import Scheduler
from holdfast.scheduler.fetching import Fetching
from holdfast.text.structured.client import GrammarService

SEED = int(os.environ.get("TIER_SEED") or (1 if in_quick_run() else random.SystemRandom().randrange(1 << 30)))
VOCABULARY, PROMPTS, WINDOW = 300, 2 if in_quick_run() else 4, 20
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HYBRID = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("Llama", {"num_hidden_layers": 3}, {}),
    "window": ("Mistral", {"num_hidden_layers": 3, "sliding_window": WINDOW}, {}),
    "hybrid": ("Gemma3", {"num_hidden_layers": 4, **HYBRID}, {}),
    "fp8": ("Llama", {"num_hidden_layers": 3}, {"kv_cache_dtype": "fp8"}),
}
BLOCKS = {"full": 34, "window": 24, "hybrid": 64, "fp8": 34}
"""So few that requests preempt each other, whatever else happens."""
RAM_PAGES = 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [b"", b"", b"</s>", *(f"{LETTERS[at % 26]}{LETTERS[at // 26]}".encode() for at in range(VOCABULARY - 3))]
Answer = tuple[list[int], Any, list[Any], list[float]]
"""Tokens, why they ended, scores of the prompt, and its vector."""


@dataclass
class World:
    """A model and who computes it; books and tiers are made for each mix."""

    name: str
    built: EngineCore
    service: GrammarService
    adapters: list[AdapterRef]
    pages: int
    requests: list[Request] = field(default_factory=list)
    expected: dict[str, Answer] = field(default_factory=dict)
    """Without tiers, prefix caching and lack of pages."""

    def core(self, kv: KVCache, copies: Any, steps_ahead: int) -> EngineCore:
        runner = self.built.runner
        runner.resize_kv(self.pages)
        pages = runner.kv.pages[1:].view(torch.uint8)
        pages.fill_(0xFF)  # NaN, in every type of number.
        runner.use_tiers(copies)
        limits = replace(self.built.scheduler.limits, max_steps_in_flight=steps_ahead + 1)
        core = EngineCore(Scheduler(limits, kv), runner, steps_ahead=steps_ahead)
        core.structured_output = StructuredOutputManager(
            lambda: self.service.address, rows=limits.max_num_seqs, vocab_size=VOCABULARY, eos_ids=(2,)
        )
        return core

    @property
    def layout(self) -> Any:
        return self.built.scheduler.kv.layout


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(lambda: Vocabulary(WORDS, {"</s>": 2}), [2], VOCABULARY)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, service: GrammarService) -> Iterator[Callable[[str], World]]:
    made: dict[str, World] = {}

    def make(name: str) -> World:
        if name not in made:
            made[name] = build(name, tmp_path_factory.mktemp(name), service)
        return made[name]

    yield make
    for world in made.values():
        world.built.close()


def build(name: str, folder: Path, service: GrammarService) -> World:
    architecture, sizes, settings = MODELS[name]
    config_type = getattr(transformers, "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config")
    torch.manual_seed(SEED)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config_type(**SIZES, **sizes)).float()
    model.save_pretrained(folder / "model")
    refs = []
    for number in (1, 2):
        path = write_adapter(folder / f"adapter-{number}", folder / "model", seed=SEED + number)
        refs.append(AdapterRef(f"adapter-{number}", number, str(path), stamp(path)))
    config = EngineConfig(
        model=str(folder / "model"), device="cpu", dtype="float32", skip_tokenizer_init=True, threads=1, max_num_seqs=6,
        max_num_batched_tokens=48, max_model_len=128, block_size=8, kv_cache_memory_bytes=2 << 20, enable_lora=True,
        max_loras=2, **settings,
    )  # fmt: skip
    core, info = build_core(config, find_model(config), lambda stage, done, total: None)
    world = World(name, core, service, refs, info.blocks)
    world.requests = traffic(random.Random(f"{SEED} {name}"), world)
    alone = world.core(KVCache(world.layout, world.pages, prefix_caching=False), None, 0)
    world.expected = serve(alone, world.requests)
    alone.structured_output.close()
    return world


def traffic(source: random.Random, world: World) -> list[Request]:
    """Each prompt is asked in every way there is."""
    shared = [[source.randrange(3, VOCABULARY) for _ in range(40)] for _ in range(2)]
    asked = list[Request]()
    for number in range(PROMPTS):
        own = [source.randrange(3, VOCABULARY) for _ in range(source.randint(3, 20))]
        prompt = shared[number % 2][: source.choice((24, 40))] + own
        ways: dict[str, dict[str, Any]] = {
            "base": {},
            "one": {"adapter": world.adapters[0]},
            "two": {"adapter": world.adapters[1]},
            "tenant": {"cache_salt": "another"},
            "grammar": {
                "structured_outputs": StructuredOutputsParams(regex=source.choice(["[a-m]+", "([a-z][a-e])+"]))
            },
            "adapted grammar": {
                "structured_outputs": StructuredOutputsParams(regex="([n-z][a-l])+"),
                "adapter": world.adapters[source.randrange(2)],
            },
            "scored": {"prompt_logprobs": 1},
            "vector": {"embed": True},
        }
        for way, differs in ways.items():
            request = {key: differs.pop(key) for key in ("adapter", "cache_salt", "embed") if key in differs}
            length = 1 if way == "vector" else source.randint(12, 30)
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, **differs)
            ends = (2,) if "grammar" in way else ()
            asked.append(
                Request(
                    request_id=f"{way} {number}", prompt_token_ids=prompt, params=params, eos_token_ids=ends, **request
                )
            )
    source.shuffle(asked)
    return asked


def serve(core: EngineCore, requests: list[Request], meddle: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    found: dict[str, Answer] = {request.request_id: ([], None, [], []) for request in requests}
    late, steps = list(requests), 0
    while late or core.has_work:
        while late and len(core.scheduler._sequences) < 8:
            core.add(late.pop(0))
        meddle()
        for output in core.step():
            assert output.failure is None, output.failure
            tokens, _, scores, vector = found[output.request_id]
            tokens.extend(output.token_ids)
            for told in output.prompt_logprobs or []:
                scores.append((told.token_ids[0], told.logprobs[0]))
            if output.embedding is not None:
                vector.extend(numpy.frombuffer(output.embedding, numpy.float32).tolist())
            found[output.request_id] = (tokens, output.finish_reason or found[output.request_id][1], scores, vector)
        steps += 1
        if steps % 8 == 0:  # It walks all pages.
            core.scheduler.check_invariants()
    core.scheduler.check_invariants()
    assert core.scheduler.kv.blocks_used == 0
    return found


def assert_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Tokens to the last; scores and vectors as near as sums in another order: rounded ones may be further apart."""
    assert found.keys() == expected.keys()
    for name, (tokens, why, scores, vector) in expected.items():
        assert found[name][:2] == (tokens, why), name
        assert [token for token, _ in found[name][2]] == [token for token, _ in scores], name
        assert [score for _, score in found[name][2]] == pytest.approx([score for _, score in scores], abs=5e-3), name
        assert found[name][3] == pytest.approx(vector, abs=5e-4), name


class Mix:
    """One engine after the other over the same tiers."""

    def __init__(self, world: World, folder: Path, tiers: str, steps_ahead: int) -> None:
        self.world, self.folder, self.steps_ahead = world, folder, steps_ahead
        self.ram, self.disk = tiers in ("RAM", "both"), tiers in ("disk", "both")
        self.file = os.memfd_create("tier") if self.ram else None
        self.store: PrefixStore | None = None
        self.copies: Any = None
        self.fetched, self.sent_back = Counter[str](), Counter[str]()

    def open(self) -> None:
        if self.disk:
            page = self.world.layout.page_bytes
            self.store = PrefixStore.open(
                self.folder / "kv", size_bytes=64 << 20, page_bytes=page, model=b"m", beat_s=0.05
            )

    def start(self) -> EngineCore:
        world, page, blocks = self.world, self.world.layout.page_bytes, BLOCKS[self.world.name]
        if self.store is None:
            self.open()
        host = HostMemory(pinned([RAM_PAGES * page], file=self.file), page) if self.ram else None
        copies: Any = None
        if host is not None:
            while host.look() < RAM_PAGES:
                time.sleep(0.001)
            disk = None if self.store is None else disk_places(self.store, page)
            runner = world.built.runner
            copies = AsGpu(GpuPageCopies(lambda: runner.kv.pages, page, SimulatedCopies(1), lambda: False, host, disk))
        elif self.store is not None:
            copies = CpuPageCopies(self.store, page)
        limits = TierLimits(
            host_pages=RAM_PAGES if self.ram else 0, most_loading_disk=4, most_storing=8, most_writing=4,
            spare_pages=blocks,
        )  # fmt: skip
        kv = KVCache(world.layout, blocks, True, limits if copies else None, self.store)
        self.core, self.copies = world.core(kv, copies, self.steps_ahead), copies
        self._watch()
        return self.core

    def _watch(self) -> None:
        scheduler = self.core.scheduler
        begin, send_back = scheduler._fetching.begin, scheduler._send_back

        def began(sequence: Any, *more: Any) -> None:
            self.fetched[way_of(sequence)] += 1
            begin(sequence, *more)

        def sent_back(sequence: Any) -> None:
            self.sent_back[way_of(sequence)] += 1
            send_back(sequence)

        scheduler._fetching.begin, scheduler._send_back = began, sent_back

    def settle(self) -> None:
        """What was to be written is on the disk."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.store is not None and self.store._writer._pending:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def stop(self) -> None:
        self.core.structured_output.close()
        if self.copies is not None:
            self.copies.close()
        self.store = self.copies = None
        self.world.built.runner.use_tiers(None)

    def check_use(self, event: str) -> None:
        """That tiers were used, and by all who could get another's pages there."""
        kv = self.core.scheduler.kv
        assert self.sent_back.total() > 0
        found = {tier.tier: tier.hit_tokens_total for tier in self.core.scheduler.stats().kv_tiers}
        if self.ram and event != "restarted":
            assert found["ram"] > 0
        if self.disk and (event == "restarted" or not self.ram):
            assert found["disk"] > 0
        if not self.ram and not self.disk:
            return
        # One of them may find all of its own in the pool: that depends on when copies are over.
        assert len({"base", "one", "two"} & self.fetched.keys()) >= 2
        assert {"grammar", "adapted grammar"} & self.fetched.keys()
        assert kv.tiers is not None
        assert kv.tiers.failed_copies == 0

    def sleep_and_wake(self) -> None:
        """The next engine takes over what was kept, and knows of nothing else."""
        kept = KVKeeper(self.core, self.world.built.runner, b"same", self.file).keep(lambda: None)
        assert kept is not None
        self.stop()
        core = self.start()
        tiers = core.scheduler.kv.tiers
        if self.ram and tiers is not None:  # Pages come when they are pinned.
            tiers.host = tiers._loads._host = HostPages(len(self.world.layout.groups), 0, tiers._left_host)
        runner = SimpleNamespace(kv=self.world.built.runner.kv, host_pages=lambda: RAM_PAGES, host_settled=lambda: True)
        KVKeeper(core, runner, b"same", self.file).restore(kept)
        core.scheduler.check_invariants()
        assert (core.scheduler.kv.blocks_indexed if tiers is None or not self.ram else len(tiers.host)) > 0


def way_of(sequence: Any) -> str:
    return str(sequence.request.request_id).rsplit(" ", 1)[0].removeprefix("again: ")


def again(requests: list[Request], source: random.Random) -> list[Request]:
    asked = [msgspec.structs.replace(one, request_id=f"again: {one.request_id}") for one in requests]
    source.shuffle(asked)
    return asked


def resizer(core: EngineCore, source: random.Random, most: int) -> Callable[[], None]:
    """Now and then another size, as often as not with room for one alone; what is given up holds nonsense."""

    def meddle() -> None:
        if source.random() < 0.1:
            least = core.scheduler.least_blocks
            size = source.choice((least, source.randint(least, most)))
            core.resize_kv(size)
            core.runner.kv.pages[size:].view(torch.uint8).fill_(0xFF)

    return meddle


EVENTS = ["resized", "slept", "restarted"]
QUICK = {
    "full": ["RAM slept", "disk restarted"],
    "window": ["RAM restarted", "disk slept"],
    "hybrid": ["RAM resized", "both restarted", "none slept"],
    "fp8": ["both slept", "disk resized"],
}


def mixes() -> Iterator[Any]:
    for name in MODELS:
        for tiers in ("none", "RAM", "disk", "both"):
            for event in EVENTS:
                marks = [] if f"{tiers} {event}" in QUICK[name] else [pytest.mark.long]
                yield pytest.param(name, tiers, event, marks=marks, id=f"{name}-{tiers}-{event}")


@pytest.fixture
def from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether fetching is sooner than computing is looked at elsewhere: here all that lies below comes from there."""
    monkeypatch.setattr(Fetching, "_fetched_s", lambda self, sequence, found, running: None)


@pytest.mark.usefixtures("from_below")
@pytest.mark.parametrize(("name", "tiers", "event"), list(mixes()))
def test_all_is_as_it_is_without_tiers(
    name: str, tiers: str, event: str, worlds: Callable[[str], World], tmp_path: Path
) -> None:
    print(f"TIER_SEED={SEED}")
    world, source = worlds(name), random.Random(f"{SEED} {name} {tiers} {event}")
    mix = Mix(world, tmp_path, tiers, source.randrange(2))
    mix.start()
    for turn in range(3):
        resized = turn == 0 or event == "resized"
        meddle = resizer(mix.core, source, BLOCKS[name] + 8) if resized else lambda: None
        asked = again(world.requests, source) if turn else world.requests
        found = serve(mix.core, asked, meddle)
        assert_same({key.removeprefix("again: "): answer for key, answer in found.items()}, world.expected)
        mix.settle()
        if turn == 1 and event == "slept":
            mix.sleep_and_wake()
        elif turn == 1 and event == "restarted":
            mix.stop()
            mix.start()
    mix.check_use(event)
    mix.stop()


@pytest.mark.usefixtures("from_below")
def test_engines_that_run_at_once_share_one_store(worlds: Callable[[str], World], tmp_path: Path) -> None:
    """The second opened it before the first wrote a page, and knows its adapters by other numbers."""
    world, source = worlds("full"), random.Random(f"{SEED} shared")
    first, second = Mix(world, tmp_path, "disk", 0), Mix(world, tmp_path, "disk", 1)
    second.open()
    first.start()
    for turn in range(2):
        serve(first.core, again(world.requests, source) if turn else world.requests)
    first.settle()
    second.start()
    renumbered = [
        one if one.adapter is None else msgspec.structs.replace(
            one, adapter=msgspec.structs.replace(one.adapter, number=3 - one.adapter.number)
        )
        for one in world.requests
    ]  # fmt: skip
    assert_same(serve(second.core, renumbered), world.expected)
    assert second.core.scheduler.kv.below_hits_total[Tier.DISK] > 0
    assert {"one", "two"} <= second.fetched.keys()
    second.stop()
    first.stop()
