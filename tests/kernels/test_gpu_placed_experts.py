"""The GPU runner with experts over VRAM and RAM: tokens and log-probabilities are those of a model whose experts all
stay. Without a GPU its kernels run in the interpreter, and a simulated link brings experts late into poisoned slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_gguf import write_expert_gguf
from simulated_copies import SimulatedCopies, unpinned_memory
from tiny_gpu import Tiny, prompt, run, tokens_of
from weight_digests import KnownWeights, differing, weight_digests

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.errors import EngineError
from holdfast.execution.layers.experts import ExpertWeights
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.expert_exchange import SHARES
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.expert_uses import ExpertUses, Swap
from holdfast.execution.streaming.host_copies import load_host_experts
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.expert_places import ExpertPlaces, exchange_layout, expert_places
from holdfast.records import SamplingParams

pytestmark = pytest.mark.usefixtures("few_programs")

K_QUANTS = "Q4_K", "Q5_K", "Q6_K"
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "num_local_experts": 4}


Kinds = tuple[str, str, str] | None
"""Of the gate's, the up and the down matrices; None: numbers."""


class Experts(Tiny):
    """Of three layers none, one and all but one of the experts stay; `few`: tokens of steps that copy nothing, None:
    all experts stay. `link_share`: the host computes what waits, but for so much of it."""

    link_share: float | None = None
    swaps = 0

    def __init__(self, folder: Path, few: int | None, kinds: Kinds = None) -> None:
        more: dict[str, Any] = {"intermediate_size": 64} if kinds else {}
        if kinds == K_QUANTS:
            more = {"intermediate_size": 256, "hidden_size": 256}
        super().__init__(folder, "Mixtral", **{**SIZES, **more})
        self.few = few
        self._checkpoint = Checkpoint(safetensors.read_headers([folder / "model.safetensors"]), "safetensors")
        if kinds is not None:
            parts = dict(zip(("gate", "up", "down"), kinds, strict=True))
            path = folder / "model.gguf"
            write_expert_gguf(
                self.spec, self._checkpoint, path, "llama", lambda name: parts.get(name.rpartition(".")[2], "F32")
            )
            files = locate(str(path), revision=None)
            self.spec, self._checkpoint = spec_of(files), open_checkpoint(files)

    def weights(self, device: torch.device) -> Weights:
        device = torch.empty(0, device=device).device  # With its number.
        return self._load(device, None if self.few is None else self._placed(device, self.few))

    def _placed(self, device: torch.device, few: int) -> DeviceExperts:
        places = self._places()
        on_gpu = device.type == "cuda"
        self.copies = CudaCopies(device) if on_gpu else SimulatedCopies(seed=1)
        memory = PinnedMemory(places.pinned_sizes, device) if on_gpu else unpinned_memory(places.pinned_sizes)
        experts = DeviceExperts(places, device, self.copies, memory, few_tokens=few)
        if self.link_share is not None:
            layout = exchange_layout(self.spec, places, few, 4)
            exchange = PinnedMemory([1 << 16], device) if on_gpu else unpinned_memory([1 << 16])
            layers = load_host_experts(self.spec, self._checkpoint, places.layers)
            self.host = ExpertHost(layers, layout, exchange, torch.float32, device, 2, self.link_share)
            experts.compute_on_host(self.host)
        return experts

    def _places(self) -> ExpertPlaces:
        sizes = {}
        for index, layer in enumerate(self._load(torch.device("cpu"), None).layers):
            assert isinstance(layer.mlp, ExpertWeights)
            sizes[index] = sum(stack.nbytes for stack in (*layer.mlp.gate_up, layer.mlp.down)) // 4
        return expert_places(sizes, 4, {0: 0, 1: 1, 2: 3})

    def _load(self, device: torch.device, experts: DeviceExperts | None) -> Weights:
        return load_weights(
            self.spec, self._checkpoint, dtype=torch.float32, device=device, expand=False, experts=experts
        )  # fmt: skip


def answers(model: Experts, device: torch.device) -> list[Any]:
    params = [SamplingParams(max_tokens=3, seed=number, logprobs=2, ignore_eos=True) for number in range(2)]
    core = model.core(device, gpu=True, slots=2)
    outputs = run(core, [prompt(1, 9), prompt(2, 1)], params)
    found: list[Any] = [tokens_of(one) for one in outputs]
    model.swaps = 0 if model.few is None else core.runner.expert_use().swaps
    found += [(entry.token_ids, entry.logprobs) for one in outputs for output in one for entry in output.logprobs or []]
    core.close()
    return found


AllStay = Callable[[Kinds], list[Any]]


@pytest.fixture(scope="module")
def all_stay(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> AllStay:
    """The answers of models whose experts all stay, each computed once."""
    return cache(lambda kinds: answers(Experts(tmp_path_factory.mktemp("stay"), None, kinds), device))


@pytest.mark.parametrize(
    "few", [0, 4, pytest.param(100, marks=pytest.mark.long)], ids=["copied", "both", "over the link"]
)
def test_answers_are_those_of_experts_that_all_stay(
    few: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, all_stay: AllStay
) -> None:
    """Bit for bit; in blocks where all are copied, and where none is. Experts change places before every step that may
    have it so."""
    draw = random.Random(few)

    def any_two(uses: ExpertUses, counted: torch.Tensor) -> list[Swap]:
        number = draw.choice([1, 2])
        table = uses.places[number].tolist()
        comes = draw.choice([expert for expert in range(4) if table[expert] < 0])
        return [Swap(number, comes, draw.choice([expert for expert in range(4) if table[expert] >= 0]))]

    monkeypatch.setattr(ExpertUses, "look_at", any_two)
    kinds = None if few == 4 else ("Q8_0", "Q8_0", "Q4_0")
    model = Experts(tmp_path, few, kinds)
    found = answers(model, device)
    copied = model.copies.use().copied_bytes
    assert copied == 0 if few == 100 else copied > 0
    assert (model.swaps > 1) == (few > 0)
    assert found == all_stay(kinds)


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.long), 0.5])
def test_the_host_computes_what_waits(share: float, tmp_path: Path, device: torch.device, all_stay: AllStay) -> None:
    """Steps of few tokens, and many. Its sums are in another order."""
    model = Experts(tmp_path, 4)
    model.link_share = share
    found = answers(model, device)
    assert model.host.pairs > 0
    model.host._lost.fill_(1)  # As a GPU says that it waited in vain.
    with pytest.raises(EngineError, match="did not get what the host was to compute"):
        model.host.check()
    wanted = all_stay(None)
    assert found[:2] == wanted[:2]
    for (tokens, logprobs), (same, expected) in zip(found[2:], wanted[2:], strict=True):
        assert tokens == same
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(None, marks=pytest.mark.long), ("Q8_0", "Q4_0", "Q5_1")],
    ids=["numbers", "blocks"],
)
def test_experts_come_and_go_while_answers_are_computed(kinds: Kinds, tmp_path: Path, device: torch.device) -> None:
    """Bit for bit, whatever number of them stays, in steps of few tokens and of many."""
    model = Experts(tmp_path, 4, kinds)
    core = model.core(device, gpu=True, slots=2)
    experts, counts = core.runner.decoder.experts, set[tuple[int, ...]]()
    assert experts is not None
    assert experts.movable

    def between() -> None:
        if (count := next(changes, None)) is not None:
            core.runner.change_experts(count)
            counts.add(experts.resident_counts)
            on_device = sum(plane.nbytes for _, stay in experts._planes.values() for plane in stay)
            assert on_device == experts.resident_bytes == core.runner.weights_bytes - fixed
            assert experts.nbytes + experts.resident_bytes == experts.bytes_with(sum(experts.resident_counts))
            assert experts.pinned_bytes == sum(piece.nbytes for piece in experts._pieces)

    changes = iter([7, None, 0, experts.most_resident, 1, 4])
    fixed = core.runner.weights_bytes - experts.resident_bytes
    params = [SamplingParams(max_tokens=5, seed=number, logprobs=2, ignore_eos=True) for number in range(2)]
    found = run(core, [prompt(1, 9), prompt(2, 1)], params, between=between)
    core.close()
    assert len(counts) == 5
    model.few = None
    plain = model.core(device, gpu=True, slots=2)
    assert told(found) == told(run(plain, [prompt(1, 9), prompt(2, 1)], params))
    plain.close()


def test_experts_of_a_layer_that_does_not_change_stay_as_they_lie(tmp_path: Path, device: torch.device) -> None:
    """Planes of K-quants lie in another order when they are loaded than when they are laid out again."""
    model = Experts(tmp_path, 4, K_QUANTS)
    core = model.core(device, gpu=True, slots=2)
    assert core.runner.decoder.experts.resident_counts == (0, 1, 3)
    core.runner.change_experts(4)
    assert core.runner.decoder.experts.resident_counts == (2, 1, 1)
    # One step is enough: its five tokens ask every expert.
    params = [SamplingParams(max_tokens=1, seed=0, logprobs=2, ignore_eos=True)]
    found = run(core, [prompt(1, 5)], params)
    core.close()
    model.few = None
    plain = model.core(device, gpu=True, slots=2)
    assert told(found) == told(run(plain, [prompt(1, 5)], params))
    plain.close()


def test_digests_of_weights_say_which_expert_is_another_wherever_it_lies(tmp_path: Path, device: torch.device) -> None:
    """They are to tell what went wrong on a GPU: they must find what is wrong."""
    model = Experts(tmp_path, None)
    plain = model.core(device, gpu=True, slots=2)
    wanted = weight_digests(plain)
    plain.close()
    model.few = 4
    core = model.core(device, gpu=True, slots=2)
    experts = core.runner.decoder.experts
    assert experts is not None
    for by_host in (False, True):
        assert differing(weight_digests(core, by_host=by_host), wanted) == []
    core.runner.change_experts(7)
    assert differing(weight_digests(core), wanted) == []
    (first, _), table = experts._bounds[1][1], experts.places[1].tolist()
    with torch.inference_mode():
        experts._pieces[1][first + 3] ^= 1  # Of the first that waits: its last matrix.
    assert differing(weight_digests(core), wanted) == [f"1.down.{table.index(-1)}"]
    core.close()


def test_a_wrong_expert_is_told_with_where_it_is_wrong_and_what_lies_there(
    tmp_path: Path, device: torch.device
) -> None:
    """In each way that it is read; they are to tell what went wrong on a GPU."""
    model = Experts(tmp_path, None)
    plain = model.core(device, gpu=True, slots=2)
    known = KnownWeights(plain, {"what was there": torch.arange(200, dtype=torch.uint8)})
    assert known.wrong(plain) == []
    plain.close()
    model.few = 4
    core = model.core(device, gpu=True, slots=2)
    experts = core.runner.decoder.experts
    assert experts is not None
    assert known.wrong(core) == []
    (first, nbytes), table = experts._bounds[1][1], experts.places[1].tolist()
    expert, end = table.index(-2), nbytes // 3
    with torch.inference_mode():
        experts._pieces[1][first + end + 8 : first + end + 48] = torch.arange(100, 140, dtype=torch.uint8)
    waits = ["the GPU reads", "copies bring", "the host reads"]
    lines = known.wrong(core)
    assert [line.split(" at 0x")[0] for line in lines] == [f"as {way} it: 1.down.{expert}" for way in waits]
    where = (
        f" of {end} bytes from 8 to 47, in 1 pages, 0 are 0; the first are those of what was there from its byte 100 on"
    )
    assert all(line.endswith(where) for line in lines), lines
    with torch.inference_mode():
        experts._pieces[1][first + end :][:end] = 0
    assert all("; the first" not in line for line in known.wrong(core)), "zeros are everywhere"
    core.close()


def told(outputs: list[Any]) -> list[Any]:
    entries = [entry for one in outputs for output in one for entry in output.logprobs or []]
    return [*(tokens_of(one) for one in outputs), *((entry.token_ids, entry.logprobs) for entry in entries)]


@pytest.mark.parametrize("share", [None, 0.0], ids=["fetched", "host"])
def test_rows_that_pad_a_step_are_no_uses(share: float | None, tmp_path: Path, device: torch.device) -> None:
    """Three sequences are a step of four rows: what the fourth would choose is not counted, fetched or computed."""
    model = Experts(tmp_path, 4)
    model.link_share = share
    core = model.core(device, gpu=True, slots=3)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    experts = core.runner.decoder.experts
    assert experts is not None
    before = int(experts._uses.sum())
    params = [SamplingParams(max_tokens=4, seed=number, ignore_eos=True) for number in range(3)]
    run(core, [prompt(number, 1) for number in range(3)], params)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    pairs = int(experts._uses.sum()) - before
    # Of each of 3 layers 2 experts for each of 3 sequences' 4 tokens; a graph's first launch is made twice.
    tokens, once = 3 * 4, 2 * 3
    assert pairs % once == 0
    assert tokens * once <= pairs <= (2 * tokens if device.type == "cuda" else tokens) * once
    if share is not None:
        assert model.host.pairs <= pairs
    core.close()


def test_host_and_link_are_measured_and_share_what_waits(tmp_path: Path, device: torch.device) -> None:
    model = Experts(tmp_path, 4)
    model.link_share = 0.0
    experts = model.weights(device).experts
    assert experts is not None
    assert [decision.field for decision in experts.decisions()] == ["link_copy", "host_experts"]
    assert all(0 < exchange.over_link < SHARES for exchange in model.host.exchanges)
    experts.close()
