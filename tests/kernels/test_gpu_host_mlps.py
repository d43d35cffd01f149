"""The GPU runner with streamed layers whose MLPs the host computes in steps of few tokens: tokens are those of
transformers. Without a GPU its kernels run in the interpreter, and a simulated link brings layers late."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from simulated_copies import SimulatedCopies, unpinned_memory
from tiny_gpu import Tiny, prompt, run, tokens_of, told_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.errors import EngineError
from holdfast.execution.gpu.decoder import arrange_layer
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.expert_host import ExpertHost
from holdfast.execution.streaming.host_copies import load_host_mlp, with_host_mlps
from holdfast.execution.streaming.host_mlps import HostMlps, MlpOffer
from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.triton_kernels.host.mlp_rows import add_rows, send_rows
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.streamed import streamed_layers
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.records import SamplingParams
from holdfast.units import GIB

FEW = 2


class Hosted(Tiny):
    """All layers but one are streamed; of those the host has the MLPs of `hosted`."""

    hosted: tuple[int, ...] = ()
    dtype = torch.float32

    def weights(self, device: torch.device) -> Weights:
        device, dtype = torch.empty(0, device=device).device, self.dtype
        on_gpu = device.type == "cuda"
        make = partial(PinnedMemory, device=device) if on_gpu else unpinned_memory
        checkpoint = Checkpoint(safetensors.read_headers(sorted(self.folder.glob("*.safetensors"))), "safetensors")
        known = EngineWeights(self.spec, None, None).by_layer(dtype=str(dtype).removeprefix("torch."))
        placed = streamed_layers(known, len(self.spec.layers) - 1, 0)
        assert set(self.hosted) < set(placed.layers)
        self.copies = CudaCopies(device) if on_gpu else SimulatedCopies(seed=1)
        layers = DeviceLayers(placed, device, self.copies, make(placed.pinned_sizes))
        arrange = partial(arrange_layer, dtype=dtype, device=device)
        weights = load_weights(
            self.spec, checkpoint, dtype=dtype, device=device, expand=True, slots=layers, arrange=arrange
        )  # fmt: skip
        if not self.hosted:
            return weights
        offer = MlpOffer(
            order=placed.layers, attention_bytes=1, mlp_bytes=1, hidden=self.spec.hidden_size, dtype=dtype, tokens=FEW,
            threads=2, room_bytes=lambda: GIB, load=lambda layer: load_host_mlp(self.spec, checkpoint, layer, dtype),
        )  # fmt: skip
        self.hosts = HostMlps(offer, layers, device, lambda sizes, device: make(sizes))
        assert set(self.hosted) <= set(self.hosts.candidates)
        self.hosts.joined = self.hosts._join(list(self.hosts._loaded(self.hosted).values()), self.hosted, FEW, "")
        return with_host_mlps(weights, self.spec, checkpoint, self.hosts)


def pairs_computed(host: ExpertHost) -> int:
    """Once its thread has counted the last step: the GPU has the answer a moment before that."""
    while host._answered != host._number:
        time.sleep(0.001)
    return host.pairs


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma2", marks=pytest.mark.long)])
def test_tokens_are_those_of_a_model_that_the_gpu_computes(tmp_path: Path, device: torch.device, family: str) -> None:
    """Prompts of more than few tokens come between steps of few: all MLPs are copied then."""
    moved, found = [], []
    for hosted in ((), (2, 3)):
        sizes = {"head_dim": 16} if family == "Gemma2" else {}
        model = Hosted(tmp_path, family, num_hidden_layers=4, **sizes)
        model.hosted = hosted
        core = model.core(device, gpu=True, slots=2)
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 3)]
        outputs = run(core, [prompt(1, 7), prompt(2, 9)], params)
        found.append([tokens_of(one) for one in outputs])
        moved.append(model.copies.use().copied_bytes)
        if hosted:
            assert pairs_computed(model.hosts.joined.host) >= 6
        core.close()
    assert found[0] == found[1]
    assert moved[1] < moved[0]


@pytest.mark.long  # Tokens in float32 show what may go wrong in the interpreter; the type is the kernels' own.
@pytest.mark.usefixtures("few_programs")
def test_log_probabilities_in_bfloat16_are_close(tmp_path: Path, device: torch.device) -> None:
    """Of given tokens, two a step, so that the host computes for all of them."""
    found = []
    for hosted in ((), (2,)):
        model = Hosted(tmp_path, "Llama", num_hidden_layers=3)
        model.hosted, model.dtype = hosted, torch.bfloat16
        core = model.core(device, gpu=True, slots=1, step=FEW, kv_dtype=torch.bfloat16)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        (outputs,) = run(core, [prompt(3, 9)], [params])
        found.append(torch.tensor([one.logprobs[0] for one in told_of(outputs)]))
        if hosted:
            assert pairs_computed(model.hosts.joined.host) >= 9
        core.close()
    assert found[0].shape == (8,)
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0)
    assert not torch.equal(found[1], found[0])


def test_a_host_that_did_not_answer_is_an_error(tmp_path: Path, device: torch.device) -> None:
    """What was added in place of its answer means nothing, in all steps from then on."""
    model = Hosted(tmp_path, "Llama", num_hidden_layers=3)
    model.hosted = (2,)
    model.weights(device)
    hosts, x = model.hosts, torch.ones((1, model.spec.hidden_size), device=device)
    assert hosts.joined is not None
    hosts.joined.host._failed.fill_(1)  # As the GPU leaves it when it has waited in vain.
    with hosts.step(1):
        exchange = hosts.exchange(2)
        assert exchange is not None
        send_rows(x, exchange)
        add_rows(exchange, x, add=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with pytest.raises(EngineError, match="did not get what the host was to compute"):
        hosts.check()
    hosts.close()
