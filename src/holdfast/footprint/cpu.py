"""What a model costs on one device, term by term. Counts bytes; decides nothing.

The terms of a process that serves on a CPU, in the order in which it takes them:

    front        the process in front of the engine's: HTTP, tokenizer, streams
    framework    what interpreter and torch keep for themselves
    libraries    pages of their files, which the kernel can drop
    weights      as they lie in memory: expanded, or in the blocks of their file
    scratch      torch's copy of the matrix it multiplies with, where it makes one
    activations  the buffers of the largest step, attention's workspace included
    logits       what sampling holds at once: copies of the rows x vocabulary, or what penalties look through
    buffers      token ids and block tables of every slot, the books of blocks and of running requests
    grammars     the processes of structured output, at the limits the system holds them to
    kv_pool      pages

The sizes of the buffers that execution allocates are declared here, and nowhere else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.checkpoints import StoredTensor
from holdfast.checkpoints.validation.stored_dtypes import PLAIN
from holdfast.footprint import experts
from holdfast.footprint.experts import mlp_width
from holdfast.footprint.identity_key import Same
from holdfast.footprint.layouts import BLOCK_COLUMNS, Quantize, memory_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, TensorSpec
from holdfast.records.sampling import SCORED_ENTRIES
from holdfast.units import GIB, MIB, format_bytes

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_ELEMENT_BYTES: Mapping[str, int] = {**ELEMENT_BYTES, "fp8": 1, "fp8_e5m2": 1}
"""Keys and values may be kept in FP8 as well: fp8 is e4m3."""

FRAMEWORK_BYTES = 172 * MIB
"""154 to 168 MiB before the first tensor with torch 2.13 (CPU build, Arm), the model's header read; the rest is what
the interpreter's heap gains while it serves."""

KV_STAGING_BYTES, KV_LARGE_STAGING_BYTES, KV_QUEUE_BYTES = 32 * MIB, 64 * MIB, 64 * MIB
"""That pages come through from the disk, large pages do, and that those wait in which are to be written there."""
KV_STAGING_PLACES, KV_ALIGNED, KV_LARGE_PAGE_BYTES = 64, 4096, 4 * MIB
KV_WORK_BYTES = 16 * MIB
"""Of its threads: what they write and check at once."""
KV_STORE_USUAL_BYTES = 100 * GIB
"""On disk, at most, where no size was set."""
KV_INDEX_BYTES = 260
"""For each page that the store may have: its record, its key and its place in a table."""


def staging_stride(page_bytes: int) -> int:
    """From one page in memory to the next: reads past the page cache go to multiples of it."""
    return -(-page_bytes // KV_ALIGNED) * KV_ALIGNED


def staging_places(page_bytes: int) -> int:
    """Pages that come from the disk at once. Of 32 MiB six of a 70B model would, asked for one by one."""
    nbytes = KV_LARGE_STAGING_BYTES if page_bytes >= KV_LARGE_PAGE_BYTES else KV_STAGING_BYTES
    return max(1, min(KV_STAGING_PLACES, nbytes // staging_stride(page_bytes)))


def kv_store_terms(size_bytes: int, page_bytes: int, *, ways: int = 1) -> dict[str, int]:
    """When a store of so many bytes on disk is full. `ways`: 2 where pages also leave through buffers, as they do from
    a GPU."""
    return {
        "buffers": ways * staging_places(page_bytes) * staging_stride(page_bytes),
        "queue": KV_QUEUE_BYTES,
        "work": KV_WORK_BYTES,
        "index": size_bytes // page_bytes * KV_INDEX_BYTES,
    }


def kv_store_bytes(size_bytes: int, page_bytes: int) -> int:
    """Of RAM, on a CPU."""
    return sum(kv_store_terms(size_bytes, page_bytes).values())


LIBRARIES_BYTES = 192 * MIB
"""80 to 171 MiB with the same: the kernel maps neighbours of a used page as the page cache holds them, most of them
right after an installation (large folios: 171 MiB on x86 for what takes 93 MiB in an old environment)."""

TOLD_ENTRIES = 2**18
"""Log-probabilities of prompts that the front holds at a time: 4,096 tokens with 20 each three times, or 131,072 with
one. A request for more is refused, requests together wait for each other."""

WHOLE_VOCABULARY_ENTRIES = 2**22
"""The same where requests may ask for the whole vocabulary (--max-logprobs -1): 85 tokens of 49,152 each. Such a
request has all of it to itself."""

TOLD_ENTRY_BYTES = 160
"""Of each of them: about 75 as JSON, more with long words, and as much again while it waits as the engine told it."""

KEPT_ENTRIES = 2**18
"""The same of answers that are not streamed, which are kept until they are whole: 11,397 tokens with 20 each, or 87,381
with none but their own. Who asks for more is refused, who needs more than is left is ended."""

KEPT_ENTRY_BYTES = 112
"""Of each, as JSON; a token counts as two more, for the pieces that it comes in."""

WAITING_ENTRIES = 2**16
"""Tokens of streams and their log-probabilities that wait for readers slower than the engine: two for each token, and
one for each log-probability. A stream that finds no room for more is ended."""

WAITING_ENTRY_BYTES = 256
"""Of each, as objects: 137 for a token alone, 195 to 242 with 20 to 1 log-probabilities were measured."""

READING_BYTES = 16 * MIB
"""Of bodies that are on their way in, 16 KiB of each not counted. Who sends more meanwhile is told to try again."""

STORED_RESPONSE_BYTES = 16 * MIB
"""Of conversations that /v1/responses keeps, as JSON. The least recently used are dropped for new ones."""

FRONT_BYTES = (
    120 * MIB
    + READING_BYTES
    + STORED_RESPONSE_BYTES
    + TOLD_ENTRIES * TOLD_ENTRY_BYTES
    + KEPT_ENTRIES * KEPT_ENTRY_BYTES
    + WAITING_ENTRIES * WAITING_ENTRY_BYTES
)
"""236 MiB. 93 with SmolLM2's tokenizer and nobody there; the rest is for connections (7 KiB each), what is asked and
larger vocabularies, 16 for bodies on their way, 16 for stored responses, 40 for what is told of prompts, 28 for what is
kept of answers and 16 for what waits in streams."""


def front_bytes(whole_vocabulary: bool) -> int:
    """With what is told of prompts where requests may ask for the whole vocabulary: JSON in the front, and what one
    step's row is as objects, in both processes."""
    if not whole_vocabulary:
        return FRONT_BYTES
    more = (WHOLE_VOCABULARY_ENTRIES - TOLD_ENTRIES) * TOLD_ENTRY_BYTES
    return FRONT_BYTES + more + 2 * SCORED_ENTRIES * WAITING_ENTRY_BYTES


LOGITS_BYTES = 4 * MIB
"""Of the logits that are sampled at a time: rows beyond it are sampled in turns, so that many streams need little more
memory."""

HEAD_ROWS = 32
"""Whose logits are computed at a time, however many are sampled in a turn: the head's weights are read once for all."""

LOGITS_COPIES = 12
"""Of one turn, at the peak of a full sort: logits, the raw ones, chances, the sorted ones and them turned round, their
masked copy and its sums in double precision make 7.3; with what the allocator keeps of the turn before, 8.8 to 11.8
were measured."""

SCORED_BYTES = 2048
"""Of one token of a prompt that is scored: 21 ids and numbers of Python's, their lists, and what travels of them."""

PENALTY_BYTES, SEEN_BYTES = 13, 61
"""For each place of a turn's longest row, and for each token that penalties see: ids, marks, sorted pairs, scores."""

MLP_TILE = 512
"""Tokens the MLP takes at a time: bounds its buffers, and keeps them in cache."""

STEP_BYTES, SAMPLING_BYTES = 4 * MIB, 8 * MIB
"""Of any step, and of any sampling, however small: code of libraries read for the first time, and what they set up."""

STEP_TOKEN_BYTES = 128
"""Ids, positions and page rows of one token of a step, with numpy's copies of them."""

BOOK_BYTES = 512
"""Of one block in the books: 163 measured while it is free; a hash, its place in the index and in line for eviction."""

REQUEST_TOKEN_BYTES = 56
"""Of one token of a running request outside the slots: Python's number, two lists, a share of a hash."""

STAGING_BYTES = 16 * MIB
"""While loading, beside the raw bytes of one tensor: the float tile of its expansion, and what the allocator keeps."""

EXPAND_SHARE = 0.25
"""Room to spare: expanded weights within this share of the budget."""

TORCH_ATTENTION_BYTES = 32 * MIB
"""Pages are gathered in pieces of 8 MiB, and two are held; scores are as large again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def weights_bytes(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    *,
    dtype: str,
    expand: bool,
    compiled: bool = False,
    quantize: Quantize | None = None,
) -> int:
    """`stored` by canonical name; None for dummy weights. `compiled`: products come from compiled kernels. `quantize`:
    plain matrices of linear layers become this while they are loaded."""
    return sum(_bytes_by_layer(Same(spec), Same(stored), dtype, expand, compiled, quantize).values())


def layer_bytes(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    *,
    dtype: str,
    expand: bool,
    compiled: bool = False,
    quantize: Quantize | None = None,
) -> tuple[int, ...]:
    """The same of each layer."""
    found = _bytes_by_layer(Same(spec), Same(stored), dtype, expand, compiled, quantize)
    return tuple(found[f"layers.{layer.index}"] for layer in spec.layers)


def bytes_by_name(
    spec: ModelSpec, stored: Stored, *, dtype: str, expand: bool, compiled: bool, quantize: Quantize | None = None
) -> Mapping[str, int]:
    """The same by `layers.3`; what is of no layer by its own name."""
    return _bytes_by_layer(Same(spec), Same(stored), dtype, expand, compiled, quantize)


def embedding_bytes(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, quantize: Quantize | None = None
) -> int:
    """The same of the embedding, where weights stay as they are stored."""
    return _bytes_by_layer(Same(spec), Same(stored), dtype, False, False, quantize)["embed"]


Stored = Mapping[str, StoredTensor] | None


@lru_cache(maxsize=64)
def _bytes_by_layer(
    model: Same[ModelSpec], files: Same[Stored], dtype: str, expand: bool, compiled: bool, quantize: Quantize | None
) -> Mapping[str, int]:
    """By `layers.3`; what is of no layer by another name."""
    total, fused = Counter[str](), defaultdict[str, list[tuple[TensorSpec, str | ScaledLayout]]](list)
    held = held_tensors(model.held, files.held, dtype=dtype, expand=expand, compiled=compiled, quantize=quantize)
    for tensor, kept, layout in held:
        layer = _layer_of(tensor.name)
        if (joined := _joined(tensor)) is not None:
            fused[joined].append((tensor, layout))
        if isinstance(layout, ScaledLayout):
            total[layer] += layout.bytes_for(*_rows_and_columns(tensor), tensor.experts)
        elif layout in ELEMENT_BYTES or kept is None:
            total[layer] += tensor.elements * ELEMENT_BYTES.get(layout, ELEMENT_BYTES[dtype])
        else:
            total[layer] += kept.nbytes
    for joined, parts in fused.items():  # Matrices that are multiplied as one share one scale of their inputs.
        total[_layer_of(joined)] -= _shared_bytes(parts)
    return total


def _layer_of(name: str) -> str:
    return ".".join(name.split(".", 2)[:2])


def _rows_and_columns(tensor: TensorSpec) -> tuple[int, int]:
    *stacked, rows, columns = tensor.shape
    return rows * (stacked[0] if stacked else 1), columns


def _joined(tensor: TensorSpec) -> str | None:
    """What a matrix and those it is fused with have in common."""
    where, _, part = tensor.name.rpartition(".")
    return next((f"{where}.{names[0]}" for names in FUSED if part in names), None)


def _shared_bytes(parts: list[tuple[TensorSpec, str | ScaledLayout]]) -> int:
    """Of matrices that are one; where one of them is otherwise, a plain one too, each is multiplied apart."""
    layout = parts[0][1]
    if not isinstance(layout, ScaledLayout):
        return 0
    alike = all(other == layout for _, other in parts) and layout.stacks([tensor.shape[-2] for tensor, _ in parts])
    return (len(parts) - 1) * layout.shared_bytes if alike else 0


def held_tensors(
    spec: ModelSpec, stored: Stored, *, dtype: str, expand: bool, compiled: bool, quantize: Quantize | None = None
) -> Iterator[tuple[TensorSpec, StoredTensor | None, str | ScaledLayout]]:
    """Every tensor that there is, as it is stored and as it lies in memory."""
    for tensor in spec.tensors:
        kept = None if stored is None else stored.get(tensor.name)
        if kept is not None or (stored is None and not tensor.optional):
            yield (
                tensor,
                kept,
                memory_layout(
                    tensor,
                    kept,
                    dtype=dtype,
                    expand=expand,
                    compiled=compiled,
                    quantization=spec.quantization,
                    quantize=quantize,
                ),
            )


def kept_dtype(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, dtype: str, expand: bool, compiled: bool
) -> str:
    """What plain matrices lie in memory as: `dtype`, or the half precision of their file."""
    return _kept_dtype(Same(spec), Same(stored), dtype, expand, compiled)


@lru_cache(maxsize=64)
def _kept_dtype(model: Same[ModelSpec], files: Same[Stored], dtype: str, expand: bool, compiled: bool) -> str:
    for _, kept, layout in held_tensors(model.held, files.held, dtype=dtype, expand=expand, compiled=compiled):
        if kept is not None and kept.layout in PLAIN and isinstance(layout, str) and layout in PLAIN:
            return PLAIN[layout]
    return dtype


def weight_sizes(kept_bytes: int, expanded_bytes: int, dtype: str) -> str:
    """Both, for people to read."""
    return f"{format_bytes(kept_bytes)}; expanded to {dtype} {format_bytes(expanded_bytes)}"


def expands(
    kept_bytes: int, expanded_bytes: int, *, dtype: str, fast_blocks: bool, budget_bytes: int
) -> tuple[bool, str]:
    """Whether quantized weights are expanded when nobody says, and why. `fast_blocks`: products with all of them as
    they are stored are the faster ones here."""
    sizes = weight_sizes(kept_bytes, expanded_bytes, dtype)
    if fast_blocks:
        return False, f"compiled products read them as they are, which is faster: {sizes}"
    if expanded_bytes <= EXPAND_SHARE * budget_bytes:
        return True, f"faster, and there is room to spare: {sizes}"
    return False, f"expanded they would take more than {EXPAND_SHARE:.0%} of the budget: {sizes}"


def kv_layout(spec: ModelSpec, *, block_tokens: int, kv_dtype: str, stages: Sequence[tuple[int, int]] = ()) -> KVLayout:
    """`stages`: the layers of each, of a pipeline."""
    groups, places = form_groups([layer.window for layer in spec.layers], stages)
    return KVLayout(
        groups=groups,
        block_tokens=block_tokens,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=KV_ELEMENT_BYTES[kv_dtype],
    )


MAIL_BYTES = 1 << 20
"""Of the memory that ranks share, for plans on their way to them; longer ones go in pieces."""
SLOT_PAGE_BYTES = 4096


def sums_apart(spec: ModelSpec) -> bool:
    """Whether what attention and MLP add to the stream is worked on before: they then have a buffer of their own."""
    return spec.decoder.norms != "before" or spec.decoder.residual_scale != 1.0


def rotations(spec: ModelSpec) -> int:
    """Kinds of rotary angles that layers have."""
    return len({spec.rope_of(layer) for layer in spec.layers} - {None})


NORMED_COPIES = 4
"""Of what torch norms at a time: in float32, squared, scaled, and rounded."""


def activations_bytes(
    spec: ModelSpec, limits: Limits, *, dtype: str, compiled_attention: bool = False, compiled: bool = False
) -> int:
    """`compiled_attention` reads pages where they lie; torch's gathers them, and queries are copied for it. `compiled`:
    products come from compiled kernels."""
    tokens, size = limits.max_num_batched_tokens, ELEMENT_BYTES[dtype]
    query, key_value = spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim
    buffers = tokens * (2 * spec.hidden_size + 2 * query + key_value) * size
    tile, decoder = min(tokens, MLP_TILE), spec.decoder
    inner = tile * 3 * mlp_width(spec) * size + experts.cpu_bytes(spec, tile, size, compiled=compiled)
    branch = tile * spec.hidden_size * size if sums_apart(spec) else 0
    normed = 0 if decoder.query_key_norm == "none" else NORMED_COPIES * tile * query * 4
    centered = NORMED_COPIES * tokens * spec.hidden_size * 4 if decoder.norm == "layer" else 0
    activated = tile * mlp_width(spec) * size if decoder.mlp == "plain" else 0
    turned = tokens * (4 + 8 * rotations(spec)) * spec.head_dim
    sampling = 3 * min(tokens, limits.max_num_seqs) * spec.hidden_size * size
    attention = 0 if compiled_attention else TORCH_ATTENTION_BYTES + 4 * tokens * query * size
    apart = branch + normed + centered + activated
    return buffers + inner + apart + turned + sampling + attention + tokens * STEP_TOKEN_BYTES + STEP_BYTES


DECODED_BYTES = 12 * MIB
"""Of a tile of codes on its way to numbers: 2 MiB in float32, as nibbles, spread, less zero points and scaled."""
ROUNDED_COPIES, ROUNDED_BYTES = 2, 24 * MIB
"""Of the inputs of a product that are rounded, in float32, with what the allocator keeps of the one before; and of the
pieces that are rounded at a time."""


def decoding_bytes(spec: ModelSpec, limits: Limits, *, rounded: bool) -> int:
    """Beside `activations_bytes`, of products with codes and their scales. `rounded`: and with rounded inputs."""
    tokens, query = limits.max_num_batched_tokens, spec.heads * spec.head_dim
    tile = min(tokens, MLP_TILE)
    lines = (tile * kind.most_here * max(spec.hidden_size, kind.intermediate_size) for kind in experts.kinds(spec))
    widest = max(tokens * spec.hidden_size, tokens * query, tile * mlp_width(spec), *lines)
    return DECODED_BYTES + (ROUNDED_COPIES * widest * 4 + ROUNDED_BYTES if rounded else 0)


def logits_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Sampled in one turn."""
    return max(1, min(max_num_seqs, LOGITS_BYTES // (4 * vocab_size)))


def head_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Of the logits buffer: one turn of sampling or more."""
    return max(logits_rows(vocab_size, max_num_seqs), min(max_num_seqs, HEAD_ROWS))


def logits_bytes(spec: ModelSpec, limits: Limits, pool_tokens: int | None = None) -> int:
    """`pool_tokens`: no more can be seen by penalties than the KV pool holds; None: it is not known yet."""
    rows = logits_rows(spec.vocab_size, limits.max_num_seqs)
    turn, places = rows * spec.vocab_size * 4, rows * limits.max_model_len
    seen = places if pool_tokens is None else min(places, pool_tokens)
    scored = limits.max_num_batched_tokens * SCORED_BYTES
    waiting = (head_rows(spec.vocab_size, limits.max_num_seqs) - rows) * spec.vocab_size * 4
    return (
        SAMPLING_BYTES
        + scored
        + waiting
        + max(LOGITS_COPIES * turn, 2 * turn + PENALTY_BYTES * places + SEEN_BYTES * seen)
    )


def buffers_bytes(layout: KVLayout, limits: Limits, *, pool_tokens: int = 0) -> int:
    """Without the books of the blocks, which grow with the pool: BOOK_BYTES each."""
    slots = limits.max_num_seqs
    # A table's rows are copied twice for a step, once at twice the width.
    tables = len(layout.groups) * slots * layout.blocks_for(limits.max_model_len) * (4 + 8 + 4)
    known = min(pool_tokens, slots * limits.max_model_len)
    ids = slots * (limits.max_model_len + 1) * 4
    return tables + ids + known * REQUEST_TOKEN_BYTES


FUSED: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("gate", "up"))
"""Matrices of a layer that are multiplied as one."""


COPIED_FROM_ROWS = 9
"""Products of fewer rows read a matrix where it lies: none was copied for 8 rows, all were for 12."""


def scratch_bytes(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    limits: Limits,
    *,
    dtype: str,
    expand: bool,
    compiled: bool = False,
) -> int:
    """The largest matrix that torch multiplies with, fused as execution fuses them; for machines where it copies."""
    sampled = head_rows(spec.vocab_size, limits.max_num_seqs) >= COPIED_FROM_ROWS
    computed = limits.max_num_batched_tokens >= COPIED_FROM_ROWS
    return _scratch_bytes(Same(spec), Same(stored), sampled, computed, dtype, expand, compiled)


@lru_cache(maxsize=64)
def _scratch_bytes(
    model: Same[ModelSpec],
    files: Same[Stored],
    sampled: bool,
    computed: bool,
    dtype: str,
    expand: bool,
    compiled: bool,
) -> int:
    """`sampled`, `computed`: whether rows that sample, and rows of a step, are enough for a copy."""
    spec, sizes = model.held, Counter[str]()
    for tensor, _, layout in held_tensors(spec, files.held, dtype=dtype, expand=expand, compiled=compiled):
        in_blocks = compiled and all(extent % BLOCK_COLUMNS == 0 for extent in tensor.shape[1:])
        if (tensor.experts > 0 and in_blocks) or (not tensor.experts and len(tensor.shape) != 2):
            continue
        where, _, part = tensor.name.rpartition(".")
        copied = sampled if part in ("head", "embed") else computed
        if copied and layout == dtype and (part != "embed" or spec.tied_embeddings):
            joined = next(("+".join(names) for names in FUSED if part in names), part)
            # Of experts one is multiplied at a time.
            sizes[f"{where}.{joined}"] += tensor.elements // (tensor.experts or 1) * ELEMENT_BYTES[dtype]
    return max(sizes.values(), default=0)


def staging_bytes(stored: Mapping[str, StoredTensor] | None) -> int:
    """The most that loading holds beside the weights in place: one tensor as stored, or one expert of a stack. Dummies
    are made in place."""
    return STAGING_BYTES + _largest_stored(Same(stored))


@lru_cache(maxsize=64)
def _largest_stored(files: Same[Stored]) -> int:
    stored = (files.held or {}).values()
    return max((tensor.nbytes // (tensor.shape[0] if len(tensor.shape) == 3 else 1) for tensor in stored), default=0)
