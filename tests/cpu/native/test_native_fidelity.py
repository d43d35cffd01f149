"""The built-in model with compiled kernels against the same weights expanded to float32, over a text."""

from __future__ import annotations

import numpy
import pytest
import torch
from benchmarks.every_logit import divergences, every_logit
from benchmarks.fidelity import token_ids

from holdfast.checkpoints import locate

TOKENS = 200
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-5}
"""Of the mean KL divergence in nats, by what keys and values are kept in: 6e-8 and 5e-7 seen. llama.cpp, whose
activations have 8 bits in such products, comes to 3e-3 (benchmarks/fidelity.py)."""

BEST_VARIANT = True
"""Others: see conftest.py."""


def test_logits_stay_close_to_float32() -> None:
    gguf = locate(None).weights[0]
    tokens = token_ids(gguf)[:TOKENS]
    reference = every_logit(gguf, tokens, compiled=False)
    for kv_dtype, bound in BOUNDS.items():
        found = every_logit(gguf, tokens, compiled=True, kv_dtype=kv_dtype)
        away = divergences(reference, found)
        assert (away > -1e-9).all()
        assert away.mean() < bound
        assert (reference.argmax(1) == found.argmax(1)).mean() > 0.98


def test_a_divergence_is_what_it_is_called() -> None:
    sure, unsure = numpy.log([[0.9, 0.1]]), numpy.log([[0.5, 0.5]])
    expected = 0.9 * numpy.log(0.9 / 0.5) + 0.1 * numpy.log(0.1 / 0.5)
    # Logits are known up to a constant.
    found = divergences((sure + 3).astype(numpy.float32), unsure.astype(numpy.float32))
    assert found == pytest.approx([expected], rel=1e-6)
