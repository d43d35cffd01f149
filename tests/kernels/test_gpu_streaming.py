"""The GPU runner with layers that do not stay on the device: tokens are those of transformers. Without a GPU its
kernels run in the interpreter, and a simulated link brings layers late into poisoned slots."""

from __future__ import annotations

import json
import random
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from lora_adapters import merge, write_adapter
from quantized_files import Format, awq, gptq, write_quantized
from safetensors.torch import load_file, save_file
from simulated_graphs import SimulatedGraphs
from streamed_tiny import Streamed
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.engine.requests.adapters import Adapters
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory.accounting import GpuHeld
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.streaming.layer_pieces import LayerPieces
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache import KVCache
from holdfast.models import from_config
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.records import EngineOutput, Request, SamplingParams, StructuredOutputsParams
from holdfast.records.structured import Vocabulary
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.text.structured.client import GrammarService


@pytest.mark.usefixtures("few_programs")
def test_tokens_are_those_of_transformers(tmp_path: Path, device: torch.device) -> None:
    """Of one request as it is, and of one with an adapter, whose weights are merged there."""
    model = Streamed(tmp_path / "model", "Llama", num_hidden_layers=4, tie_word_embeddings=False)
    write_adapter(tmp_path / "adapter", model.folder, seed=1, rank=4)
    known = Adapters(model.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=4))
    adapter = known.load("adapter", str(tmp_path / "adapter"), anywhere=True)
    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=96, max_loras=1)
    lora = LoraLimits(max_loras=1, max_rank=4, cached=1)
    runner = GpuRunner(model.spec, model.weights(device), model.layout(), limits, device, lora=lora)
    runner.back_kv(64)
    asked = SchedulerLimits(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=96, max_steps_in_flight=2, max_loras=1
    )
    core = EngineCore(Scheduler(asked, KVCache(model.layout(), 64, True)), runner, steps_ahead=1)
    params, found = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), dict[str, list[int]]()
    for name, ref in (("plain", None), ("adapted", adapter)):
        core.add(Request(request_id=name, prompt_token_ids=prompt(1, 9), params=params, adapter=ref))
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    model.assert_greedy(prompt(1, 9), found["plain"])
    folder = merge(tmp_path / "merged", model.folder, tmp_path / "adapter")
    model.model = transformers.LlamaForCausalLM.from_pretrained(folder).float().eval()
    model.assert_greedy(prompt(1, 9), found["adapted"])
    assert found["adapted"] != found["plain"]
    assert model.copies.use().copied_bytes > 2 * model.layers.moved_bytes > 0
    core.close()


class _OnDisk(Streamed):
    on_disk = 2


@pytest.mark.usefixtures("few_programs")
def test_layers_and_rows_of_the_embedding_from_a_disk_change_no_token(tmp_path: Path, device: torch.device) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
    params = [SamplingParams(temperature=0.7, seed=one, top_k=5, max_tokens=3, ignore_eos=True) for one in range(2)]
    prompts, found = [prompt(1, 7), prompt(2, 3)], []
    for kind in (Tiny, _OnDisk):
        model = kind(tmp_path, "Llama", **shape)
        core = model.core(device, gpu=True, slots=2)
        found.append([tokens_of(outputs) for outputs in run(core, prompts, params)])
        if isinstance(model, _OnDisk):
            assert model.layers.embedding_rows is not None
            assert model.layers.embedding is None
        core.close()
    assert found[0] == found[1]


@pytest.mark.usefixtures("few_programs")
def test_experts_and_structured_output_are_those_of_a_model_that_stays(tmp_path: Path, device: torch.device) -> None:
    """Of answers held to a regex and of free ones. Not bit for bit: a mask that is late makes another step of it."""
    experts = {"num_hidden_layers": 4, "num_local_experts": 2, "hidden_size": 32, "num_attention_heads": 2}
    tokens = [b"", b"", b"</s>", *(bytes([97 + at % 26]) for at in range(200))]
    held = SamplingParams(
        max_tokens=2, temperature=0.0, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[a-c]{2}")
    )
    params = [held, SamplingParams(max_tokens=2, seed=3, logprobs=2, ignore_eos=True)]
    found, logprobs = [], list[list[float]]()
    with closing(GrammarService(lambda: Vocabulary(tokens, {"</s>": 2}), [2], 211)) as service:
        service.start()
        for kind in (Tiny, Streamed):
            model = kind(tmp_path, "Mixtral", **experts)
            core = model.core(device, gpu=True, slots=2)
            core.structured_output = StructuredOutputManager(
                lambda: service.address, rows=2, vocab_size=model.spec.vocab_size, eos_ids=(2,)
            )
            outputs = run(core, [prompt(1, 5), prompt(2, 7)], params)
            entries = [entry for output in outputs for one in output for entry in one.logprobs or []]
            found.append(([tokens_of(one) for one in outputs], [one.token_ids for one in entries]))
            logprobs.append([value for one in entries for value in one.logprobs])
            if isinstance(model, Streamed):
                assert model.copies.use().copied_bytes > 2 * model.layers.moved_bytes > 0
            core.close()
    assert found[0] == found[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert re.fullmatch(b"[a-c]{2}", b"".join(tokens[token] for token in found[1][0][0] if token != 2))


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_experts_in_act_order_are_those_of_a_model_that_stays(tmp_path: Path, device: torch.device) -> None:
    """Orders come and go with their layers, whose gate and up have the same one, or two."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    plain = Tiny(tmp_path / "plain", "Qwen3Moe", head_dim=16, num_hidden_layers=3, **sizes)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    write_quantized(plain.folder, tmp_path / "quantized", Format(config, gptq(symmetric=False, ordered=True)))
    _share_orders(tmp_path / "quantized" / "model.safetensors", "model.layers.2.")
    params, found = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)], []
    for kind in (_Kept, _StreamedCodes):
        model = kind.__new__(kind)
        model.folder = tmp_path / "quantized"
        model.spec = from_config(json.loads((model.folder / "config.json").read_text()))
        weights = model.weights(device)
        assert [layer.mlp.same_order for layer in weights.layers] == [False, False, True]  # type: ignore[union-attr]
        [outputs] = run(model.core(device, gpu=True, slots=2), [prompt(1, 6)], params)
        found.append([(one.token_ids, one.logprobs) for one in outputs])
    assert found[0] == found[1]


@pytest.mark.usefixtures("few_programs")
def test_zero_points_that_travel_two_to_a_byte_change_nothing(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whether layers come for every step, come to stay, or leave."""
    shape = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
    plain = Tiny(tmp_path / "plain", "Llama", **shape)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write_quantized(plain.folder, tmp_path / "quantized", Format(config, awq()))
    params = [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)]
    found, dice, packed, pack, counts = [], random.Random(3), list[int](), LayerPieces.pack, set[int]()
    monkeypatch.setattr(LayerPieces, "pack", lambda to, *which: (packed.append(which[1].numel()), pack(to, *which)))
    for kind, on_disk in ((_Kept, 0), (_StreamedCodes, 0), (_StreamedCodes, 1)):
        monkeypatch.setattr(_StreamedCodes, "on_disk", on_disk)
        dice.seed(3)
        packed.clear()
        counts.clear()
        model = kind.__new__(kind)
        model.folder = tmp_path / "quantized"
        model.spec = from_config(json.loads((model.folder / "config.json").read_text()))
        core = model.core(device, gpu=True, slots=2)
        if isinstance(model, _StreamedCodes):
            layers, step = model.layers, core.step
            assert sum(packed) == 2 * sum(model.saved(EngineWeights(model.spec, None, None))) > 0

            def moved() -> list[EngineOutput]:
                layers.change([layer for layer in range(4) if dice.random() < 0.6])  # noqa: B023
                counts.add(len(layers.streamed))  # noqa: B023
                return step()  # noqa: B023

            core.step = moved  # type: ignore[method-assign]
        [outputs] = run(core, [prompt(1, 6)], params)
        found.append([(one.token_ids, one.logprobs) for one in outputs])
        core.close()
        assert found[0] == found[-1]
        assert kind is _Kept or len(counts) > 2


class _StreamedCodes(Streamed):
    expand = False


class _Kept(Tiny):
    def weights(self, device: torch.device) -> Weights:
        checkpoint = Checkpoint(safetensors.read_headers((self.folder / "model.safetensors",)), "safetensors")
        return load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=False)


def _share_orders(file: Path, layer: str) -> None:
    """Up's order becomes gate's: other numbers, and as good."""
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith(layer) and name.endswith("up_proj.g_idx")]:
        tensors[name] = tensors[name.replace("up_proj", "gate_proj")].clone()
    save_file(tensors, file)


@pytest.mark.usefixtures("few_programs")
def test_tokens_are_the_same_while_layers_come_to_stay_and_leave(tmp_path: Path, device: torch.device) -> None:
    """At random between steps, also while one is in flight."""
    shape = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2}
    params = [SamplingParams(temperature=0.7, seed=one, top_k=5, max_tokens=3, ignore_eos=True) for one in range(2)]
    prompts, counts = [prompt(1, 7), prompt(2, 3)], set[int]()
    plain = Tiny(tmp_path, "Llama", **shape).core(device, gpu=True, slots=2)
    expected = [tokens_of(outputs) for outputs in run(plain, prompts, params)]
    plain.close()
    model = Streamed(tmp_path, "Llama", **shape)
    core, dice = model.core(device, gpu=True, slots=2), random.Random(5)
    step = core.step

    def moved() -> list[EngineOutput]:
        model.layers.change([layer for layer in range(4) if dice.random() < 0.6])
        counts.add(len(model.layers.streamed))
        return step()

    core.step = moved  # type: ignore[method-assign]
    assert [tokens_of(outputs) for outputs in run(core, prompts, params)] == expected
    core.close()
    assert len(counts) > 2
    assert model.driver is None or (model.driver.handles, model.driver.mapped) == ({}, {})


class _EnoughMemory:
    def held(self) -> GpuHeld:
        return GpuHeld(0, 1 << 50, 1 << 50)

    def told_bytes(self) -> int | None:
        return None

    def kept_by_torch(self) -> int:
        return 0


@pytest.mark.usefixtures("few_programs")
def test_steps_are_graphs_while_all_layers_stay_and_tokens_are_the_same(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, meanwhile, and when layers have left again, whoever has counted graphs or not."""
    shape = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
    params = [SamplingParams(temperature=0.7, seed=one, top_k=5, max_tokens=12, ignore_eos=True) for one in range(2)]
    prompts = [prompt(1, 7), prompt(2, 3)]
    plain = Tiny(tmp_path, "Llama", **shape).core(device, gpu=True, slots=2)
    expected = [tokens_of(outputs) for outputs in run(plain, prompts, params)]
    plain.close()
    model = Streamed(tmp_path, "Llama", **shape)
    core = model.core(device, gpu=True, slots=2)
    runner, layers, step, number, captured = core.runner, model.layers, core.step, 0, list[int]()
    assert isinstance(runner, GpuRunner)
    assert runner.may_capture
    if device.type != "cuda":
        runner._graphs = SimulatedGraphs(runner, layers, monkeypatch)
    graphs = runner._graphs
    assert graphs is not None
    room = GraphsRoom(_EnoughMemory(), 1, 1 << 30, 1)
    runner.limit_graphs(room)
    wanted = {0: (1, 2), 2: (), 7: (0, 2), 9: (), 12: (1,), 13: ()}

    def moved() -> list[EngineOutput]:
        nonlocal number
        if number in wanted:
            if number != 12:  # There a layer leaves under graphs: they are not used then.
                runner.close_graphs()
                room.give(0 if wanted[number] or number == 13 else room.wanted_bytes)
                assert graphs.captured == ()
            layers.change(wanted[number])
        number += 1
        outputs = step()
        captured.append(len(graphs.captured))
        if layers.streamed or layers.comes:
            assert runner.graphs_now is None
        return outputs

    core.step = moved  # type: ignore[method-assign]
    assert [tokens_of(outputs) for outputs in run(core, prompts, params)] == expected
    core.close()
    assert captured[:3] == [0, 0, 0], "layers that come to stay are copied by a step that is launched"
    assert max(captured[3:7]) > 0
    assert captured[7:9] == [0, 0]
    assert max(captured[9:12]) > 0
    assert captured[13:] == [0] * len(captured[13:]), "nobody left room for any"
    if isinstance(graphs, SimulatedGraphs):
        assert graphs.replayed > 0


@pytest.mark.usefixtures("few_programs")
def test_an_embedding_on_a_disk_is_never_read_by_a_graph(tmp_path: Path, device: torch.device) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
    model = _OnDisk(tmp_path, "Llama", **shape)
    core = model.core(device, gpu=True, slots=2)
    assert isinstance(core.runner, GpuRunner)
    assert not core.runner.may_capture
    assert core.runner._graphs is None
    core.close()
