# mypy: disable-error-code="import-untyped"
"""Chooses the next token of every row on the device, with nothing read by the host: fit for a CUDA graph.

The contract is holdfast.execution.sampling.sampler's, up to rounding where a comparison is exactly at its boundary.
Knows rows, slots and their parameters; not the model, and not who asked.

A row is split over programs, and five kernels follow each other. All of them leave at once where there is nothing
to do for a row: greedy rows need the first and the last alone, rows without top_k and top_p not the third and fourth.

    scan    the best score of each split
    weigh   the weight of each split; how many tokens lie in each bin of distance from the best
    gather  the bins in which top_k and top_p may end; what is surely kept; a list of the tokens in doubt
    settle  the exact distance up to which tokens are kept
    pick    the draw: the split it falls in, then the token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from holdfast.execution.triton_kernels.sampling import kernels
from holdfast.execution.triton_kernels.sampling.slots import SlotParams
from holdfast.footprint.sampling import BINS, LISTED, STATE_WORDS, most_splits, split_tokens

BLOCK = 1024
"""Tokens a program takes at a time; with 8 warps, 4 a thread, which leaves registers for several programs at once."""
WARPS = 8


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the kernels hand on. Nothing in it lives longer than a step, and nothing has to be cleared."""

    best: torch.Tensor
    best_at: torch.Tensor
    masses: torch.Tensor
    """[row, split]: weight within the reach of min_p."""
    kept: torch.Tensor
    """[row, split]: weight that passed top_k and top_p too."""
    bins: torch.Tensor
    state: torch.Tensor
    """[row]: tokens listed, first bin in doubt, last one, tokens before it, last distance kept, whether top_k binds."""
    listed: torch.Tensor
    """[row, distances' bits | ids, LISTED]."""

    @staticmethod
    def allocate(most_rows: int, vocabulary: int, device: torch.device) -> Workspace:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        parts = most_rows * most_splits(vocabulary)
        return Workspace(
            empty(parts, dtype=torch.float32),
            empty(parts),
            empty(parts, dtype=torch.int64),
            empty(parts, dtype=torch.int64),
            empty(most_rows, BINS),
            empty(most_rows, STATE_WORDS),
            empty(most_rows, 2, LISTED),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)


def sample_rows(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    params: SlotParams,
    known: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    *,
    adjusted: torch.Tensor | None = None,
) -> None:
    """One token for each row into `out`, and to known[slot, length]: what the next step reads.

    logits [rows, vocabulary] (any float, rows at any stride), not changed; slots, lengths [rows] int32: -1 or a slot
    that nothing was written for is padding, and gets a 0 that goes nowhere. known [slots, places] int32. A row with a
    logit that is infinite or no number gets NO_TOKEN, and its slot something that is none of its answer.
    adjusted: what adjust_rows filled in the same step.
    """
    rows, vocab = logits.shape
    tokens = split_tokens(rows, vocab)
    splits = triton.cdiv(vocab, tokens)
    padded = triton.next_power_of_2(most_splits(vocab))
    lanes = adjusted is not None
    front = (logits, logits.stride(0), vocab, slots, params.table, adjusted if lanes else params.table)
    work = workspace
    kernels.scan[(splits, rows)](
        *front, work.best, work.best_at, work.bins, work.state, tokens, splits,
        BLOCK=BLOCK, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
    kernels.weigh[(splits, rows)](
        *front, work.best, work.masses, work.bins, tokens, splits,
        BLOCK=BLOCK, SPLITS=padded, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
    kernels.gather[(splits, rows)](
        *front, work.best, work.masses, work.kept, work.bins, work.state, work.listed, tokens, splits,
        BLOCK=BLOCK, SPLITS=padded, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
    kernels.settle[(rows,)](
        *front, work.best, work.masses, work.kept, work.state, work.listed, tokens, splits,
        BLOCK=BLOCK, SPLITS=padded, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
    kernels.pick[(rows,)](
        *front, work.best, work.best_at, work.masses, work.kept, work.state, lengths, out, known, known.stride(0),
        known.shape[1], tokens, splits,
        BLOCK=BLOCK, SPLITS=padded, LANES=lanes, num_warps=WARPS,
    )  # fmt: skip
