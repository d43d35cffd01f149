"""Structured output in bytes: the processes that compile grammars and fill masks, the vocabulary they share, and all
grammars that are compiled at once. No library, and nothing of what a grammar is."""

from __future__ import annotations

from holdfast.footprint.sampling import mask_words
from holdfast.units import MIB

TOKEN_BYTES = 550
"""Of each token of a vocabulary, as a tree and in the lists beside it."""
SERVICE_BYTES = 26 * MIB
"""Of the process that workers are forked from, without the vocabulary: 49 MiB were seen with 49,152 tokens."""
WORKER_BYTES = 4 * MIB
"""Of each worker, of what it no longer shares with the service: 3.6 MiB were seen."""
CHECKING_WORKERS = 3
"""Two that check grammars quickly, one that does it slowly."""
MOST_PROVEN_WORKERS, MOST_NEW_WORKERS = 8, 4
FEW_CORES = 2
"""Where a model is computed on the CPU: its cores are the model's."""
LEAST_LANE_BYTES = 16 * MIB
"""That a worker may take, however many share what there is."""
FORM_BYTES, WRITTEN_BYTES = 256 << 10, 64
"""Of each answer that follows a grammar, and of each byte in which that is written: 16 MiB were seen with 64 schemas of
12 fields each, 3.2 MiB with one of 60 KB."""
SPARE_BYTES = 32 * MIB
"""Beside FORM_BYTES for each sequence: for the larger ones among them, and for those that stay compiled. An answer
whose grammar has no room waits until another has ended."""
SLOW_LANE_BYTES = 48 * MIB
"""That one worker may take for grammars that are costly; the system holds it to that."""
CHECKS_BYTES = (12 + 12 + 48) * MIB
"""Of grammars that are being checked: two quickly, one slowly."""


def lane_workers(cores: int) -> tuple[int, int]:
    """Most processes that follow proven grammars, and new ones."""
    return max(1, min(MOST_PROVEN_WORKERS, cores // 2)), max(1, min(MOST_NEW_WORKERS, cores // 4))


def forms_bytes(vocab_size: int, max_num_seqs: int, cores: int = FEW_CORES) -> int:
    """Of all processes, once one answer must follow a grammar; and a mask and a narrowing of it for each. `cores`: that
    are free for it."""
    masks = max_num_seqs * 2 * mask_words(vocab_size) * 4
    shared = sum(lane_workers(cores))
    workers = (shared + 1 + CHECKING_WORKERS) * WORKER_BYTES
    lanes = shared * shared_lane_bytes(max_num_seqs, cores) + SLOW_LANE_BYTES + CHECKS_BYTES
    return SERVICE_BYTES + vocab_size * TOKEN_BYTES + workers + lanes + masks


def held_bytes(max_num_seqs: int) -> int:
    """All grammars that are compiled at once, but the costly ones."""
    return max_num_seqs * FORM_BYTES + SPARE_BYTES


def shared_lane_bytes(max_num_seqs: int, cores: int) -> int:
    """That one worker may take which many answers share: what waits for room is counted over all of them."""
    return max(LEAST_LANE_BYTES, held_bytes(max_num_seqs) // sum(lane_workers(cores)))


def form_bytes(written_bytes: int) -> int:
    """Of one that is written so, before it is known what it takes."""
    return FORM_BYTES + written_bytes * WRITTEN_BYTES
