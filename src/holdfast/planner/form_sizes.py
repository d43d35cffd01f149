"""What holds answers to a form: bytes of a vocabulary, of one form and of all that are compiled at once. No library,
and nothing of what a form is."""

from __future__ import annotations

from holdfast.planner.sampling_sizes import mask_words
from holdfast.units import MIB

TOKEN_BYTES = 400
"""Of each token of a vocabulary, as a tree: 19 MiB were seen with 49,152 tokens and 108 with 262,144."""
FORM_BYTES, WRITTEN_BYTES = 256 << 10, 64
"""Of each answer held to a form, and of each byte in which that is written: 16 MiB were seen with 64 schemas of 12
fields each, 3.2 MiB with one of 60 KB."""
SPARE_BYTES = 32 * MIB
"""Beside FORM_BYTES for each sequence: for the larger ones among them, and for those that stay compiled. An answer
whose form has no room waits until another has ended."""


def forms_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Once one is asked for: the vocabulary, forms, and a mask and a narrowing of it for each."""
    masks = max_num_seqs * 2 * mask_words(vocab_size) * 4
    return vocab_size * TOKEN_BYTES + held_bytes(max_num_seqs) + masks


def held_bytes(max_num_seqs: int) -> int:
    """All that are compiled at once."""
    return max_num_seqs * FORM_BYTES + SPARE_BYTES


def form_bytes(written_bytes: int) -> int:
    """Of one that is written so."""
    return FORM_BYTES + written_bytes * WRITTEN_BYTES
