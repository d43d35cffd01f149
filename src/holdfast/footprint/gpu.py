"""What this engine allocates on a GPU beside weights and KV pages, for limits: execution takes its sizes from here.

    activations  the decoder's buffers for the largest step, the workspaces of attention and of cuBLAS
    logits       rows that sample x vocabulary, and what sampling and log-probabilities hold beside them
    buffers      token ids, block tables, packets from the host
    graphs       captured steps, and kernels as they are loaded

Pure arithmetic: no torch, no triton.
"""

from __future__ import annotations

from functools import cache

from holdfast.footprint import sampling as sampling_sizes
from holdfast.footprint.cpu import ELEMENT_BYTES, Limits, sums_apart
from holdfast.footprint.experts import gpu_bytes, kinds, mlp_width
from holdfast.footprint.rounded import workspace_bytes
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.records.sampling import MAX_LOGPROBS
from holdfast.units import MIB

LEAST_CAPABILITY = (8, 0)
"""bfloat16 and asynchronous copies: Ampere and later."""
SKINNY_ROWS = 2
"""Up to so many rows, products with a dense matrix come from a kernel of our own: with more, cuBLAS was faster."""
LARGE_BYTES = 16 * MIB
"""From this size on cuBLAS is the faster one with two rows already (H200)."""
SKINNY_BLOCK_ROWS = 128
"""Up to so many, products with quantized matrices: for cuBLAS they would have to be expanded first."""
EXPANDED_BYTES = 32 * MIB
"""Of the tile that quantized matrices are expanded to, for products with many rows: what stays in the second level
cache. Products with fewer rows use the same memory."""
SUMS_BYTES = 16 * MIB
"""Of that, sums of products whose columns are split among programs."""
SPLIT_COUNTERS = 8192
"""Tiles of outputs that such a product may have."""
CUBLAS_BYTES = 64 * MIB
"""torch gives cuBLAS 32 MiB on Hopper for each stream that multiplies: the engine's, and that of captures."""
LOGPROB_ROWS = 16
"""Log-probabilities are worked out for so many rows at a time."""
TOLD_BYTES = (1 + MAX_LOGPROBS) * (4 + 4)
"""Of one token of a prompt: log-probabilities of itself and of the likeliest, its rank and their ids."""
UPDATE_WORDS = 1 << 19
"""Places and values of ids and tables that travel in one packet."""
LINE_WORDS = 32
"""Arrays in a packet begin at whole lines: kernels are compiled anew for pointers that are aligned otherwise."""

PROCESSORS = 132
"""Multiprocessors that decode is cut for; another number costs speed, not correctness."""
PROGRAMS_PER_PROCESSOR = 8
"""Enough that the last wave is a small share of all."""
CODES_PROGRAMS_PER_PROCESSOR = 4
"""The same over FP8 pages, where rows alone do not fill the device."""
MOST_SPLITS = 64


GRAPHS_BYTES = 160 * MIB
"""Code of kernels and libraries, and what the first capture sets up (H200: 144 to 217 MiB)."""
GRAPH_LAYER_BYTES = 34 << 10
"""What each further graph was seen to take for each layer (H200: 20 MiB for 24 graphs of 28 layers, 50 of 64)."""
EXPERTS_APART_BYTES = 256 * MIB
"""Beyond that, of kernels that find experts in two places, fetch some and hand others to the host: their code and what
the driver sets up for them (H200: about 200 MiB in the profile run, 25 more in later steps)."""
EXCHANGE_BLOCKS = 32
"""Of a kernel that adds up what several ranks have computed."""
EXCHANGE_WORDS_BYTES = 2 * EXCHANGE_BLOCKS * 16 * 4
"""By which such blocks wait for one another, two for each of up to 16 ranks."""
MOST_EXCHANGE_RANKS = 8
"""That read one another's memory: with more, NCCL's rings are the better way."""
LINE_WORDS_BYTES = 4096
"""By which a rank and those of the stages before and behind it wait for one another."""
MOST_EXCHANGE_BYTES = 8 * MIB
"""That a rank shows the others at a time; what is larger goes in pieces, or another way."""
KINDS_OF_WORK = 3
"""Steps that only draw, steps with rows whose logits are adjusted first, and steps that end with the logits because
masks are still on their way: a graph of each for every size."""


@cache
def padded_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to, each a graph. Ascending, `most` the last: padding costs a quarter at
    worst beyond 64 rows, an eighth beyond 256."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most, 128))
    return (*(size for size in steps if size < most), most)


def code_bytes(*, experts_apart: bool) -> int:
    """Of kernels and libraries, with what the first capture sets up. `experts_apart`: not all stay on the GPU."""
    return GRAPHS_BYTES + experts_apart * EXPERTS_APART_BYTES


def graphs_bytes(layers: int, sequences: int, *, captured: bool = True, experts_apart: bool = False) -> int:
    """With all graphs captured that there can be; or with none, for kernels are loaded all the same. `experts_apart`:
    experts do not all stay on the GPU."""
    graphs = captured * KINDS_OF_WORK * len(padded_sizes(sequences)) * layers * GRAPH_LAYER_BYTES
    return code_bytes(experts_apart=experts_apart) + graphs


GATHERED_ROWS = 512
"""At a time, of inputs whose columns have an order of their own."""


def exchange_slot_bytes(hidden: int, tokens: int, widest_vocab: int, *, dtype: str) -> int:
    """Of what a rank shows the others: the stream of a step, or a row of its logits. `widest_vocab`: rows of the
    vocabulary that one rank has."""
    size = ELEMENT_BYTES[dtype]
    wanted = max(min(tokens * hidden * size, MOST_EXCHANGE_BYTES), widest_vocab * size)
    return -(-wanted // EXCHANGE_WORDS_BYTES) * EXCHANGE_WORDS_BYTES


def exchange_memory_bytes(slot_bytes: int) -> int:
    """That each rank lets the others read: one slot is filled while another may still be read."""
    return EXCHANGE_WORDS_BYTES + 2 * slot_bytes


def line_memory_bytes(slot_bytes: int) -> int:
    """Beside that, of a rank that hands on to another stage what a slot holds: one is filled while another is read."""
    return LINE_WORDS_BYTES + 2 * slot_bytes


def node_lines_bytes(stream_bytes: int, answer_bytes: int, tensor_parallel: int, nodes: int) -> int:
    """In RAM, pinned, of the node that has most: each rank of its first stage takes and each of its last hands on; the
    first node takes answers and the last hands them on."""
    if nodes == 1:
        return 0
    streams = tensor_parallel * line_memory_bytes(stream_bytes)
    return streams + max(streams if nodes > 2 else 0, line_memory_bytes(answer_bytes))


def host_lines_bytes(stream_bytes: int, answer_bytes: int, stages: int, nodes: int) -> int:
    """The same of the first node where GPUs map nothing of one another, with so many `stages` of one GPU each: both
    ends of a line between two of them lie there."""
    stream, answer = line_memory_bytes(stream_bytes), line_memory_bytes(answer_bytes)
    return 2 * (stages - 1) * stream + (2 * answer if nodes == 1 else stream + answer)


def beside_ranks_bytes(spec: ModelSpec, limits: Limits, vocab_rows: int, ranks: int, *, dtype: str) -> int:
    """Of one rank of several, beside its activations: its sums before they are added up, its part of the logits,
    tokens as its rows of the vocabulary number them, the largest of each row of inputs on each of `ranks`, and of
    models that norm all heads together the squares of each row of queries and of keys."""
    tokens, size = limits.max_num_batched_tokens, ELEMENT_BYTES[dtype]
    apart = 0 if sums_apart(spec) else tokens * spec.hidden_size
    squares = 2 if spec.decoder.query_key_norm == "whole" else 0
    return (apart + limits.max_num_seqs * vocab_rows) * size + (3 + ranks + squares) * tokens * 4


def gathered_rows_bytes(whole: int, own: int, limits: Limits, *, dtype: str) -> int:
    """Of rows of so many columns that ranks gather, and of those columns of them, in their order, that one rank has."""
    return min(limits.max_num_batched_tokens, GATHERED_ROWS) * (whole + own) * ELEMENT_BYTES[dtype]


def whole_lines(words: int) -> int:
    return -(-words // LINE_WORDS) * LINE_WORDS


def decode_splits(rows: int, kv_heads: int, *, codes: bool = False) -> int:
    """Into how many parts each row's keys are cut at most, by the padded number of rows alone. `codes`: of pages in
    FP8, of which a program reads as many keys in half the time."""
    if codes and rows * kv_heads < PROCESSORS:
        return min(MOST_SPLITS, PROCESSORS * CODES_PROGRAMS_PER_PROCESSOR // (rows * kv_heads))
    return min(MOST_SPLITS, -(-PROCESSORS * PROGRAMS_PER_PROCESSOR // (rows * kv_heads)))


@cache
def decode_parts(most_rows: int, kv_heads: int) -> int:
    """The most splits of all rows together, for any number of rows up to `most_rows`."""
    split = -(-PROCESSORS * PROGRAMS_PER_PROCESSOR // kv_heads)  # From this many rows on each has one.
    return max(most_rows, *(rows * decode_splits(rows, kv_heads) for rows in range(1, min(most_rows, split) + 1)))


def decode_workspace_bytes(most_rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """For any number of rows up to `most_rows`: each split leaves an output and a logarithm for every head, float32."""
    return decode_parts(most_rows, kv_heads) * heads * (head_dim + 1) * 4


def sampling_lanes(rows: int) -> int:
    """Rows of a step that may have penalties, biases or bans: all of them."""
    return rows


def activations_bytes(spec: ModelSpec, limits: Limits, *, dtype: str, quantized: bool, rounded: bool = False) -> int:
    """`rounded`: inputs of products are rounded to one byte, see `footprint.rounded`."""
    tokens, rows, size = limits.max_num_batched_tokens, limits.max_num_seqs, ELEMENT_BYTES[dtype]
    query, key_value = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    streams = 3 if sums_apart(spec) else 2
    columns = streams * spec.hidden_size + 2 * query + key_value + 3 * mlp_width(spec)
    angles = sum(rope.dim for rope in {spec.rope_of(layer) for layer in spec.layers} if rope is not None)
    buffers = tokens * (columns * size + angles * 4) + 2 * rows * spec.hidden_size * size
    attention = decode_workspace_bytes(rows, spec.heads, spec.kv_heads, spec.head_dim)
    experts = gpu_bytes(spec, tokens, size)
    shared_width = max((kind.shared_intermediate_size for kind in kinds(spec)), default=0)
    widest = max(spec.hidden_size, query, mlp_width(spec), shared_width)
    inputs = workspace_bytes(tokens, widest, spec.hidden_size, size)
    shared = (EXPANDED_BYTES + SPLIT_COUNTERS * 4 if quantized else 0) + (inputs if rounded else 0)
    return buffers + attention + experts + CUBLAS_BYTES + shared


def logits_bytes(spec: ModelSpec, limits: Limits, *, dtype: str) -> int:
    rows, vocabulary = limits.max_num_seqs, spec.vocab_size
    lanes = sampling_lanes(rows)
    sampling = (
        sampling_sizes.workspace_bytes(rows, vocabulary)
        + sampling_sizes.parameter_bytes(rows, lanes, vocabulary)
        + sampling_sizes.lane_bytes(lanes, vocabulary)
    )
    # Chosen rows as they are, in float32, their log-probabilities, and a comparison with each.
    scored = min(rows, LOGPROB_ROWS) * vocabulary * (ELEMENT_BYTES[dtype] + 4 + 4 + 1)
    told = limits.max_num_batched_tokens * TOLD_BYTES
    return rows * vocabulary * ELEMENT_BYTES[dtype] + sampling + scored + told


def slot_words(layout: KVLayout, limits: Limits) -> int:
    """int32 numbers of ids and tables. One place beyond the context: the last token sampled is kept too."""
    tables = len(layout.groups) * layout.blocks_for(limits.max_model_len)
    return limits.max_num_seqs * (limits.max_model_len + 1 + tables)


def decode_packet_words(rows: int) -> int:
    """Slots, positions and lengths of single tokens."""
    return 3 * whole_lines(rows)


def mixed_packet_words(rows: int, tokens: int) -> int:
    """A token's slot and position, its place if it is scored, and two of each tile, of which there are no more than
    tokens; ten of each row."""
    return 5 * whole_lines(tokens) + 10 * whole_lines(rows)


def buffers_bytes(layout: KVLayout, limits: Limits) -> int:
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    packets = 2 * whole_lines(UPDATE_WORDS) + decode_packet_words(rows) + mixed_packet_words(rows, tokens)
    return (slot_words(layout, limits) + packets + rows) * 4
