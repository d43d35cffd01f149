"""The byte terms of one rank beside its KV pool, by name, for a GPU or a CPU. Estimates carry how far off they may be.

    context      driver, CUDA context and libraries      framework    interpreter, torch (CPU)
    links        buffers of NCCL or RCCL between ranks
    front        the process in front of it (CPU)        weights      as they lie in memory
    activations  the widest live set of the largest step logits       rows that sample x vocabulary; of other
                                                                      engines what is beyond activations
    buffers      token ids, block tables                 graphs       captured CUDA graphs
    encoder      of images: its largest step beyond what activations have, and what it hands to the text model
    adapters     LoRA slots                              staging      of loading alone: a tensor as it is stored
    rotary       tables of every position               padding      of experts, to their kernel's tiles
    compute      llama.cpp's one buffer for a step, logits and all; it captures no graphs that count

Rotary and padding are of engines that keep them (vllm_weights.py). Of GPUs that are not NVIDIA's, `driver` stands for
the context, and no graphs are counted on those whose engines capture none.

What this engine itself would run on a CPU is counted in fit/cpu.py. Decides nothing, and knows no budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.footprint import cpu, gpu, lora
from holdfast.footprint.cpu import Limits
from holdfast.footprint.identity_key import Same
from holdfast.footprint.structured_output import forms_bytes
from holdfast.models import LayerSpec, ModelSpec
from holdfast.planner.sizing.sharded_weights import DTYPE_BYTES, has_whole_experts
from holdfast.units import GIB, MIB

CONTEXT_BYTES = 450 * MIB
"""0.3 to 0.5 GiB on recent cards, measured before the first tensor."""
ENGINE_CONTEXT_BYTES = 620 * MIB
"""Of this engine's process: 612 MiB on an H200 (driver 580, torch 2.11) with a first tensor of one number."""
GRAPHS_BASE_BYTES = 370 * MIB
GRAPHS_BYTES_A_COLUMN = 5 * 1024
"""Times hidden size times layers. Two points of vLLM 0.26 on an H200 lie on this line: 0.99 GiB for 4096 x 32 and
0.5 GiB for 1024 x 28."""
GRAPHS_MOST_BYTES = 2 * GIB
"""The line is not followed beyond what has been seen of large models."""
GRAPHS_FIRST_BYTES = 96 * MIB
"""Of these, what the first capture takes whatever its size; the rest is shared alike by the sizes that are captured, as
vLLM's own log of them shows (pull request 22897: 24 to 28 MiB for each of most)."""
GRAPHS_MOST_ROWS = 512
"""The largest size that is captured, and twice the sequences at most: 51 sizes where nothing is set."""
LLAMA_STEP_TOKENS = 512
"""llama.cpp's own (-ub), whatever a plan's steps are."""
LLAMA_MASK_BYTES = 2
"""For each token of a step and of the context: attention's mask."""
LIVE_HIDDEN, LIVE_INNER = 4, 3
"""Buffers of hidden width (stream, norm, attention's input and output) and of the MLP's (gate, up, product) that live
at once. It gives 1.81 GiB for an 8B model at 16,384 tokens, where vLLM measured 1.78, and 2.02 for Qwen2.5-1.5B at
32,768, where it printed 2.02."""
GRAPHS_NAMES = {"nvidia": "graphs", "amd": "hip_graphs"}
"""By vendor; what is not here captures none: Metal, and vLLM on Intel's GPUs unless it is told to."""
GPU_WORKSPACE_BYTES = 16 * MIB
"""Of attention's split sums and of cuBLAS."""
ENCODER_UNCERTAINTY = 0.5
"""Engines cut batches of images differently, split towers over ranks or do not, and attend in their own ways."""
GRAPHS_WITH_ADAPTERS = 3
"""Times what graphs take without: a step is captured once more, with twice as many kernels. Not measured yet."""
SAMPLED_BYTES = 10
"""For each row and token of the vocabulary: as computed, in float32, and as probabilities."""
SORTED_BYTES = 38
"""The same where the whole vocabulary is sorted: 6 as computed and in float32; 12 of sorted values and their places, as
much again that the sort works in, and 8 of the places it starts from. Phi-4-mini printed 1.83 GiB for 256 rows of
200,064 tokens, which are 1.81."""
UNIFIED_BYTES = int(2.2 * GIB)
"""Instead of the context, of a GPU in its machine's RAM: what it cannot tell from others' memory. Qwen3-0.6B on a GB10
printed 3.35 GiB with weights of 1.12; of seven starts on a Jetson Orin the middle one had 2.18."""


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    nbytes: int
    uncertainty: float = 0.0
    """As a share of it, either way: 0 is counted, not estimated."""


def gpu_terms(
    spec: ModelSpec,
    limits: Limits,
    *,
    dtype: str,
    weights_bytes: int,
    tensor_parallel: int,
    layers: Sequence[int],
    last_stage: bool,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    graphs: bool = True,
    vendor: str = "nvidia",
    rotary_bytes: int = 0,
    padding_bytes: int = 0,
    links_bytes: int = 0,
    unified: bool = False,
    sorts: bool = False,
) -> list[Term]:
    """`sorts`: the whole vocabulary, for every row that samples."""
    captured = GRAPHS_NAMES.get(vendor)
    activations = activations_bytes(spec, limits, dtype, tensor_parallel, layers)
    context = UNIFIED_BYTES if unified else CONTEXT_BYTES
    terms = [
        Term("context", context, 0.25) if vendor == "nvidia" else Term("driver", context, 0.5),
        Term("links", links_bytes, 0.5),
        Term("weights", weights_bytes),
        Term("rotary", rotary_bytes),
        Term("padding", padding_bytes),
        Term("activations", activations, 0.25),
        Term("encoder", encoder_bytes(spec, limits, dtype, activations) if 0 in layers else 0, ENCODER_UNCERTAINTY),
        Term("logits", logits_bytes(spec, limits, dtype, activations, sorts=sorts) if last_stage else 0),
        Term("buffers", limits.max_num_seqs * limits.max_model_len // 16 * 4 + limits.max_num_batched_tokens * 64),
        Term(captured or "graphs", graphs_bytes(spec, layers, limits) if graphs and captured else 0, 0.5),
        Term("adapters", adapters_bytes(spec, dtype, layers, max_loras, max_lora_rank, tensor_parallel)),
    ]
    return [term for term in terms if term.nbytes]


def llama_gpu_terms(
    spec: ModelSpec, limits: Limits, *, weights_bytes: int, vendor: str = "nvidia", adapters: int = 0
) -> list[Term]:
    """Of llama.cpp with flash attention: a step's buffer holds the logits of all its tokens and the stream in float32,
    which is the 258.5 MiB that it prints for an 8B model of Llama 3, and attention's mask."""
    rows = spec.vocab_size * 4 + spec.hidden_size * 4 + limits.max_model_len * LLAMA_MASK_BYTES
    terms = [
        Term("context", CONTEXT_BYTES, 0.25) if vendor == "nvidia" else Term("driver", CONTEXT_BYTES, 0.5),
        Term("weights", weights_bytes),
        Term("compute", LLAMA_STEP_TOKENS * rows, 0.25),
        Term("adapters", adapters),
    ]
    return [term for term in terms if term.nbytes]


def engine_gpu_terms(
    spec: ModelSpec,
    limits: Limits,
    *,
    dtype: str,
    weights_bytes: int,
    slots: Sequence[Term] = (),
    block_tokens: int,
    quantized: bool,
    rounded: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 16,
    adapted: Sequence[ModelSpec] = (),
    graphs: bool = True,
    experts_apart: bool = False,
) -> list[Term]:
    """Of a model that this engine runs on one GPU: what it allocates, by the declarations it allocates from. `slots`:
    that layers or experts take turns in which do not stay there. `adapted`: what adapters change on each rank, of which
    the one that holds most counts; empty: all of it."""
    kernels = gpu.graphs_bytes(
        _captured_layers(spec, max_loras), limits.max_num_seqs, captured=graphs, experts_apart=experts_apart
    )
    layout = cpu.kv_layout(spec, block_tokens=block_tokens, kv_dtype=dtype)
    terms = [
        Term("context", ENGINE_CONTEXT_BYTES, 0.25),
        Term("weights", weights_bytes),
        *slots,
        Term("activations", gpu.activations_bytes(spec, limits, dtype=dtype, quantized=quantized, rounded=rounded)),
        Term("logits", gpu.logits_bytes(spec, limits, dtype=dtype)),
        Term("buffers", gpu.buffers_bytes(layout, limits)),
        Term("graphs", kernels, 0.5),
    ]
    if max_loras:
        each = (
            lora.gpu_bytes(own, limits, dtype=dtype, places=max_loras, max_rank=max_lora_rank)
            for own in adapted or (spec,)
        )
        terms.append(Term("adapters", max(each)))
    return terms


def later_graphs_bytes(spec: ModelSpec, limits: Limits, max_loras: int = 0) -> int:
    """Room beyond the term `graphs` of a model that streams layers on one GPU, once all have come to stay there."""
    return gpu.later_graphs_bytes(_captured_layers(spec, max_loras), limits.max_num_seqs)


def _captured_layers(spec: ModelSpec, max_loras: int) -> int:
    return (GRAPHS_WITH_ADAPTERS if max_loras else 1) * len(spec.layers)


def engine_gpu_loading(weights_bytes: int, slots: Sequence[Term], largest_quantized_bytes: int) -> tuple[Term, ...]:
    """At the peak of loading there: a tensor that stays in the blocks of its file is on the GPU twice while its rows
    are put in their order; others are filled in tile by tile."""
    return (
        Term("context", ENGINE_CONTEXT_BYTES, 0.25),
        Term("weights", weights_bytes),
        *slots,
        Term("staging", cpu.STAGING_BYTES + largest_quantized_bytes),
    )


def activations_bytes(spec: ModelSpec, limits: Limits, dtype: str, ranks: int, layers: Sequence[int]) -> int:
    widest = _widest(Same(spec), ranks, tuple(layers))
    return limits.max_num_batched_tokens * widest * DTYPE_BYTES[dtype] + GPU_WORKSPACE_BYTES


@lru_cache(maxsize=256)
def _widest(key: Same[ModelSpec], ranks: int, layers: tuple[int, ...]) -> int:
    return max(_live_columns(key.held, key.held.layers[layer], ranks) for layer in layers)


def _live_columns(spec: ModelSpec, layer: LayerSpec, ranks: int) -> int:
    attention = (spec.heads + 2 * spec.kv_heads) * spec.head_dim // ranks
    if layer.experts is None:
        mlp = LIVE_INNER * (layer.intermediate_size or spec.intermediate_size) // ranks
    else:
        # The inputs of the second product and its outputs take turns in one buffer.
        experts = layer.experts
        inner = experts.intermediate_size // (1 if has_whole_experts(spec) else ranks)
        routed = experts.per_token * (max(2 * inner, spec.hidden_size) + inner)
        mlp = routed + LIVE_INNER * experts.shared_intermediate_size // ranks
    return LIVE_HIDDEN * spec.hidden_size + max(attention, mlp)


def encoder_images(spec: ModelSpec, limits: Limits) -> int:
    """That go through the encoder at once: as many as a step has tokens for, and one at least; vLLM sets its budget so,
    and tries it when it starts. 0: there are none, or it is not known how large they are."""
    return 0 if spec.encoder is None else max(1, limits.max_num_batched_tokens // spec.encoder.tokens)


def encoder_bytes(spec: ModelSpec, limits: Limits, dtype: str, activations: int) -> int:
    """It computes before the text model does, in the same memory: only what it takes beyond that is its own. What comes
    out of it is kept until the text model has read it. Whole on every rank, as its weights are."""
    if spec.encoder is None:
        return 0
    images, element = encoder_images(spec, limits), DTYPE_BYTES[dtype]
    live = images * spec.encoder.patches * spec.encoder.live_columns * element
    handed = images * spec.encoder.tokens * spec.encoder.outputs * spec.hidden_size * element
    return max(0, live - activations) + handed


def logits_bytes(spec: ModelSpec, limits: Limits, dtype: str, activations: int, *, sorts: bool = False) -> int:
    """Beyond activations: the layers' memory is free again by then, but for what they hand over. Every rank gathers the
    whole vocabulary."""
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    handed_over = limits.max_num_batched_tokens * spec.hidden_size * DTYPE_BYTES[dtype]
    sampled = rows * spec.vocab_size * (SORTED_BYTES if sorts else SAMPLED_BYTES)
    return max(0, handed_over + sampled - activations)


def graphs_bytes(spec: ModelSpec, layers: Sequence[int], limits: Limits) -> int:
    """For so many sequences; where none are set, what was measured."""
    whole = min(GRAPHS_MOST_BYTES, GRAPHS_BASE_BYTES + GRAPHS_BYTES_A_COLUMN * spec.hidden_size * len(layers))
    sizes = captured_sizes(limits.max_num_seqs, limits.max_num_batched_tokens)
    return GRAPHS_FIRST_BYTES + (whole - GRAPHS_FIRST_BYTES) * sizes // captured_sizes(GRAPHS_MOST_ROWS)


def captured_sizes(sequences: int, step_tokens: int = GRAPHS_MOST_ROWS) -> int:
    """How many vLLM captures: 1, 2, 4, then every eighth and from 256 on every sixteenth, up to twice the sequences and
    no more than a step has tokens."""
    most = min(2 * sequences, step_tokens, GRAPHS_MOST_ROWS)
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, GRAPHS_MOST_ROWS + 1, 16)))


def adapters_bytes(
    spec: ModelSpec, dtype: str, layers: Sequence[int], max_loras: int, rank: int, tensor_parallel: int
) -> int:
    """For every linear layer of a block, both factors, in every slot."""
    wanted, total = set(layers), 0
    for tensor in spec.tensors if max_loras else ():
        if tensor.layer in wanted and tensor.linear and len(tensor.shape) == 2 and tensor.part == "text":
            rows, columns = tensor.shape
            split = rows if tensor.shard_axis == 0 else columns
            total += rank * (rows + columns - split + -(-split // tensor_parallel))
    return max_loras * total * DTYPE_BYTES[dtype]


def cpu_terms(
    spec: ModelSpec,
    limits: Limits,
    *,
    dtype: str,
    weights_bytes: int,
    block_tokens: int,
    max_loras: int = 0,
    max_lora_rank: int = 16,
) -> list[Term]:
    """Of a server of a model that this engine does not run: both its processes, with torch's own attention."""
    layout = cpu.kv_layout(spec, block_tokens=block_tokens, kv_dtype=dtype)
    activations = cpu.activations_bytes(spec, limits, dtype=dtype)
    terms = [
        Term("front", cpu.FRONT_BYTES, 0.25),
        Term("framework", cpu.FRAMEWORK_BYTES, 0.25),
        Term("libraries", cpu.LIBRARIES_BYTES, 0.4),
        Term("weights", weights_bytes),
        Term("activations", activations, 0.25),
        Term("encoder", encoder_bytes(spec, limits, dtype, activations), ENCODER_UNCERTAINTY),
        Term("logits", cpu.logits_bytes(spec, limits)),
        Term("buffers", cpu.buffers_bytes(layout, limits)),
        Term("grammars", forms_bytes(spec.vocab_size, limits.max_num_seqs)),
        Term("adapters", adapters_bytes(spec, dtype, range(len(spec.layers)), max_loras, max_lora_rank, 1)),
    ]
    return [term for term in terms if term.nbytes]
