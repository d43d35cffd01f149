"""Groups of layers, and how many pages a sequence holds at most."""

from __future__ import annotations

import random

from holdfast.kvcache import KVCache, KVLayout, form_groups


def make_layout(windows: list[int | None], block_tokens: int) -> KVLayout:
    groups, places = form_groups(windows)
    return KVLayout(
        groups=groups, block_tokens=block_tokens, layers_per_page=places, kv_heads=2, head_dim=8, element_bytes=2
    )


def test_layers_that_remember_alike_share_a_group_of_the_rarest_kinds_size() -> None:
    groups, places = form_groups([None, 8, 8, None, 8, 8, 8])
    assert places == 2
    assert [(group.layers, group.window) for group in groups] == [
        ((0, 3), None),
        ((1, 2), 8),
        ((4, 5), 8),
        ((6,), 8),
    ]
    assert [group.index for group in groups] == [0, 1, 2, 3]


def test_one_kind_is_one_group() -> None:
    groups, places = form_groups([None] * 30)
    assert (len(groups), places) == (1, 30)


def test_a_page_is_as_large_as_its_shape_says() -> None:
    layout = make_layout([None] * 3, 16)
    assert layout.page_shape == (3, 2, 16, 2, 8)
    assert layout.page_bytes == 3 * 2 * 16 * 2 * 8 * 2


def test_a_position_sees_itself_and_the_window_before() -> None:
    window, full = form_groups([4, None])[0]
    assert [window.first_needed(position) for position in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert full.first_needed(10) == 0


def test_no_sequence_ever_holds_more_than_the_peak() -> None:
    choice = random.Random(3)
    for _ in range(200):
        windows = choice.choice([[None], [7], [1], [None, 5], [3, 20]])
        layout = make_layout(windows, choice.choice([1, 3, 4, 16]))
        kv = KVCache(layout, 400, prefix_caching=False)
        context, step = choice.randint(1, 80), choice.randint(1, 30)
        book, held = kv.open(), 0
        while book.length < context:
            end = min(context, book.length + choice.randint(1, step))
            kv.release_outside_window(book, book.length)
            kv.grow(book, end)
            kv.note_scheduled(book, end, [])
            held = max(held, book.held)
        assert held <= layout.peak_blocks(context, step)
