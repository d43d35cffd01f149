"""Structured output in bytes: the processes that compile grammars and fill masks, the vocabulary they share, and all
grammars that are compiled at once. No library, and nothing of what a grammar is."""

from __future__ import annotations

from holdfast.planner.sampling_sizes import mask_words
from holdfast.units import MIB

TOKEN_BYTES = 550
"""Of each token of a vocabulary, as a tree and in the lists beside it."""
SERVICE_BYTES = 26 * MIB
"""Of the process that workers are forked from, without the vocabulary: 49 MiB were seen with 49,152 tokens."""
WORKER_BYTES = 4 * MIB
"""Of each worker, of what it no longer shares with the service: 3.6 MiB were seen."""
WORKERS = 6
"""Three of the engine, two that check grammars quickly and one that does it slowly."""
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


def forms_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Of all processes, once one answer must follow a grammar; and a mask and a narrowing of it for each."""
    masks = max_num_seqs * 2 * mask_words(vocab_size) * 4
    processes = SERVICE_BYTES + vocab_size * TOKEN_BYTES + WORKERS * WORKER_BYTES
    return processes + held_bytes(max_num_seqs) + SLOW_LANE_BYTES + CHECKS_BYTES + masks


def held_bytes(max_num_seqs: int) -> int:
    """All grammars that are compiled at once, but the costly ones."""
    return max_num_seqs * FORM_BYTES + SPARE_BYTES


def shared_lane_bytes(max_num_seqs: int) -> int:
    """That one worker may take which many answers share. There are two: what waits for room counts over both."""
    return held_bytes(max_num_seqs) // 2 + SPARE_BYTES


def form_bytes(written_bytes: int) -> int:
    """Of one that is written so, before it is known what it takes."""
    return FORM_BYTES + written_bytes * WRITTEN_BYTES
