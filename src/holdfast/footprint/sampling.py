"""How sampling is cut and what it holds on the device: splits of a row, bytes of its tables. No torch, no triton."""

from __future__ import annotations

SLOT_WORDS = 16
"""int32 words a slot has in the table of parameters."""
LANE_ENTRIES = 2048
"""Bans and biases that one lane holds: the biases a request may bring, and as many bans."""
BAD_SPELLINGS = 256
"""Of bad words, that one lane holds: two of each."""
BAD_SPELLING_WORDS = 16
"""int32 words of each: how many tokens, and the tokens."""
BINS = 512
BINS_PER_UNIT = 16
"""Bins of scores by their distance from the best one. The last, 31.9 units and more away, has no weight."""
STATE_WORDS = 8
LISTED = 16384
"""Tokens of a row that are listed where top_k or top_p may end; where there are more, the row itself is read again."""

_SMALLEST_SPLIT = 2048
_LARGEST_SPLIT = 16384
_PROGRAMS = 1024
"""Programs that keep a large GPU busy: with fewer, rows are cut finer."""


def split_tokens(rows: int, vocabulary: int) -> int:
    """Tokens of a row that one program takes, by the padded number of rows. What is sampled does not depend on it."""
    tokens = _LARGEST_SPLIT
    while tokens > _SMALLEST_SPLIT and rows * -(-vocabulary // tokens) < _PROGRAMS:
        tokens //= 2
    return tokens


def most_splits(vocabulary: int) -> int:
    """Of a row, whatever the number of rows."""
    return -(-vocabulary // _SMALLEST_SPLIT)


def workspace_bytes(most_rows: int, vocabulary: int) -> int:
    """What a Workspace holds: bests, masses, bins, states and lists of candidates."""
    splits = most_splits(vocabulary) * (4 + 4 + 8 + 8)
    return most_rows * (splits + BINS * 4 + STATE_WORDS * 4 + LISTED * (4 + 4))


def mask_words(vocabulary: int) -> int:
    """int32 words with a bit for every token."""
    return -(-vocabulary // 32)


def parameter_bytes(slots: int, lanes: int, vocabulary: int) -> int:
    """What SlotParams holds on the device: words of slots; of lanes their entries, a mask, and spellings."""
    lane_words = LANE_ENTRIES * 2 + mask_words(vocabulary) + BAD_SPELLINGS * BAD_SPELLING_WORDS
    return slots * SLOT_WORDS * 4 + max(lanes, 1) * lane_words * 4


def lane_bytes(lanes: int, vocabulary: int) -> int:
    """What Lanes hold: adjusted logits (float32) and counts of tokens (int32) for each."""
    return lanes * vocabulary * (4 + 4)
