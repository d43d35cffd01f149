"""The pinned memory between a GPU and the host's experts: parts lie apart, at cache lines, and fill it."""

from __future__ import annotations

import pytest

from holdfast.footprint.experts import LINE_BYTES, ExchangeLayout


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(
    ("tokens", "per_token", "hidden", "element_bytes"), [(1, 1, 32, 4), (3, 8, 96, 2), (32, 8, 2048, 2)]
)
def test_parts_lie_apart_and_fill_it(layers: int, tokens: int, per_token: int, hidden: int, element_bytes: int) -> None:
    layout = ExchangeLayout(layers, tokens, per_token, hidden, element_bytes)
    pairs = tokens * per_token * 4
    sizes = {"chosen": pairs, "weights": pairs, "x": tokens * hidden * element_bytes, "y": tokens * hidden * 4}
    parts = {(begin, begin + 4) for layer in range(layers) for begin in (layout.request(layer), layout.reply(layer))}
    assert len(parts) == 2 * layers
    # Layers whose numbers are both even or both odd use the same buffer.
    parts |= {
        (begin, begin + size)
        for layer in range(2)
        for name, size in sizes.items()
        for begin in (getattr(layout, name)(layer),)
    }
    assert layout.x(0) == layout.x(2) != layout.x(1)
    ordered = sorted(parts)
    assert all(begin % LINE_BYTES == 0 for begin, _ in ordered)
    ends = [begin for begin, _ in ordered[1:]] + [layout.nbytes]
    assert all(0 <= after - end < LINE_BYTES for (_, end), after in zip(ordered, ends, strict=True))
