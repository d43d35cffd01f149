"""A refused POST /memory says what to send: whoever asks over HTTP has no flags."""

from __future__ import annotations

import pytest

from holdfast.errors import DoesNotFitError
from holdfast.server.endpoints.memory import _refused


@pytest.mark.parametrize(
    ("advised", "said"),
    [
        ("--vram 20GiB, or a smaller model", 'send {"vram": "20GiB"}; GET /memory shows the budget in force'),
        ("--max-model-len 4096", 'send another size, as in {"vram": "8GiB"}; GET /memory shows the budget in force'),
        ('POST /memory {"vram": "1GiB"}', 'POST /memory {"vram": "1GiB"}'),
        (None, None),
    ],
)
def test_flags_become_a_body(advised: str | None, said: str | None) -> None:
    assert _refused(DoesNotFitError("too small", fix=advised), "vram").fix == said
