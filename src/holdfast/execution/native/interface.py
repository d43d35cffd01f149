"""The compiled module as module.c defines it, for the type checker. Addresses are those of tensors (data_ptr), 0 for
none; strides count elements. The compiled functions check nothing: their typed wrappers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Kernels(Protocol):
    VARIANT: str
    """Of those that holdfast.hardware.kernels chooses from."""

    def share(self, parallel: int, /) -> None: ...

    def stop(self) -> None: ...

    def matmul(
        self,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        weights: int,
        bias: int,
        rows: int,
        columns: int,
        outputs: int,
        layout: int,
        add: int,
        threads: int,
        /,
    ) -> None: ...

    def expand(
        self,
        weights: int,
        chosen: int,
        rows: int,
        stored_rows: int,
        columns: int,
        layout: int,
        out: int,
        out_stride: int,
        threads: int,
        /,
    ) -> None: ...

    def weave(self, weights: int, rows: int, columns: int, layout: int, /) -> int: ...

    def weave_planes(self, planes: int, /) -> int: ...

    def turn_awq(self, words: int, inputs: int, stride: int, codes: int, /) -> None: ...

    def attend(
        self,
        query: int,
        query_stride: int,
        out: int,
        out_stride: int,
        keys: int,
        values: int,
        page_bytes: int,
        stored: int,
        block_tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        tables: int,
        table_stride: int,
        slots: int,
        ends: int,
        counts: int,
        firsts: int,
        rows: int,
        window: int,
        scale: float,
        softcap: float,
        threads: int,
        /,
    ) -> None: ...

    def normalize(
        self,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        out: int,
        out_stride: int,
        rows: int,
        columns: int,
        epsilon: float,
        threads: int,
        /,
    ) -> None: ...

    def gate(
        self,
        gate_up: int,
        gate_stride: int,
        out: int,
        out_stride: int,
        rows: int,
        columns: int,
        activation: int,
        threads: int,
        /,
    ) -> None: ...

    def turn(
        self,
        query: int,
        query_stride: int,
        key: int,
        key_stride: int,
        value: int,
        value_stride: int,
        cosines: int,
        sines: int,
        positions: int,
        places: int,
        center: int,
        keys: int,
        values: int,
        stored: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        half: int,
        threads: int,
        /,
    ) -> None: ...

    def layers(self, *numbers: float | Callable[[float], None] | None) -> None:
        """Whole decoder layers, one after another: what decoder.py puts together, in its order."""

    def experts(self, *numbers: int) -> None:
        """The MLP of a layer with experts: what launch.py puts together, in its order."""

    def host_room(self, layers: int, count: int, hidden: int, per_token: int, numbers: int, tokens: int, /) -> int: ...

    def serve(
        self,
        layers: int,
        count: int,
        hidden: int,
        per_token: int,
        numbers: int,
        room: int,
        room_bytes: int,
        step: int,
        tokens: int,
        patience_ns: int,
        threads: int,
        /,
    ) -> tuple[int, int, int, int, int]:
        """(result, layer, waited_ns, computed_ns, pairs), as host_experts.h has them."""

    def post(self, word: int, value: int, /) -> None: ...

    def await_word(self, word: int, value: int, alarm: int, calm: int, spin_ns: int, patience_ns: int, /) -> int: ...

    def await_mail(
        self,
        word: int,
        value: int,
        alarm: int,
        calm: int,
        mail_spin_ns: int,
        patience_ns: int,
        waited: int,
        /,
    ) -> int: ...

    def meet(self, group: int, watch: Callable[[float], None], /) -> None: ...

    def sum_ranks(self, group: int, watch: Callable[[float], None], x: int, count: int, threads: int, /) -> None: ...
