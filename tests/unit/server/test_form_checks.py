"""Forms are looked at off the loop: no small one waits behind a large one, and none is looked at for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.errors import GrammarError
from holdfast.records import SamplingParams
from holdfast.records.structured import LARGE_BYTES, StructuredOutputsParams
from holdfast.server import constraints
from holdfast.text.structured import llguidance_backend as matching

SMALL = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
LARGE = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["x" * LARGE_BYTES], asked_as="guided_choice"))


def test_a_large_form_keeps_nobody_waiting_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def check(form: StructuredOutputsParams, tokenizer: object) -> None:
        if form.choice:
            begun.set()
            assert go_on.wait(120)

    async def both() -> None:
        large = asyncio.create_task(constraints.check_off_loop(LARGE, None))  # type: ignore[arg-type]
        assert await asyncio.to_thread(begun.wait, 60)
        monkeypatch.setattr(constraints, "CHECK_TIMEOUT_S", 60.0)
        await constraints.check_off_loop(SMALL, None)  # type: ignore[arg-type]
        with pytest.raises(GrammarError, match="could not be compiled") as caught:
            await large
        assert (caught.value.code, caught.value.field) == ("HF362", "guided_choice")

    monkeypatch.setattr(matching, "check_form", check)
    monkeypatch.setattr(constraints, "CHECK_TIMEOUT_S", 0.2)
    try:
        asyncio.run(both())
    finally:
        go_on.set()
