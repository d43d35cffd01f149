"""A scheduler in simulated time, with the costs of an H200 and Llama 8B: of a step, a token, what each token sees, and
of a page over each direction of the link. Steps are planned two ahead, as a GPU's are, and one that samples nothing is
applied at once, while it is computed; pages move when what was launched before is computed, and are seen when a step is
applied.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.kvcache import KVCache, KVLayout, TierLimits, form_groups
from holdfast.records import Request, SamplingParams, StepPlan, StepResult
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.scheduler.prefill_cost import pairs

BLOCK = 16
PAGE_S, STEP_S, TOKEN_S, PAIR_S = 2**21 / 50e9, 0.006, 23e-6, 0.7e-9
LAUNCH_S = 0.005
"""Of a prompt's step, for the host."""
LIMITS = {"storing_share": 1 / 8, "spare_share": 1 / 4}


@dataclass
class World:
    """`smaller`: all sizes are so many times smaller, and what is in them takes as much longer. `host_s`: for how long
    the host is busy with a step that it launches, while the GPU computes what it can. `page_s`: what a page takes over
    the link."""

    scheduler: Scheduler
    smaller: int
    host_s: Callable[[StepPlan], float] = lambda plan: 0.0
    page_s: Callable[[], float] = lambda: PAGE_S
    host_pages: int = 0
    """Of RAM, that are pinned by now."""
    now_s: float = 0.0
    computed_s: float = 0.0
    """Until when all that was launched will be computed."""
    first_s: dict[str, float] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    told_s: dict[str, list[float]] = field(default_factory=dict)
    """When each token of an answer came."""
    computed: int = 0
    _in_flight: list[tuple[StepPlan, float]] = field(default_factory=list)
    _free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _due: list[tuple[float, int, float]] = field(default_factory=list)
    """When a page will have come or gone, its copy, and how long the link brings it; 0 where it takes it away."""

    def add(self, name: str, tokens: int, answer: int) -> None:
        draw = random.Random(name.split()[-1])
        ids, params = (
            [draw.randrange(50_000) for _ in range(tokens)],
            SamplingParams(max_tokens=answer, ignore_eos=True),
        )
        request = Request(request_id=name, prompt_token_ids=ids, params=params, arrival_s=self.now_s)
        assert self.scheduler.add(request, self.now_s) is None

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            while len(self._in_flight) < 2 and (plan := self.scheduler.schedule(self.now_s)) is not None:
                self.launch(plan)
                if not plan.rows:
                    break
            if not self._in_flight:
                return
            self.apply()

    def launch(self, plan: StepPlan) -> None:
        layout, before_s = self.scheduler.kv.layout, self.computed_s
        for copy in plan.copies:
            if copy.before_step:
                continue
            way = int(copy.target_tier > 0)
            page_s = self.page_s() * self.smaller
            self._free_s[way] = max(self._free_s[way], self.now_s, before_s) + page_s
            self._due.append((self._free_s[way], copy.copy_id, 0.0 if way else page_s))
        seen = sum(pairs(layout, row.start, row.start + row.count) for row in plan.rows)
        own_s = (
            STEP_S + (plan.token_count * TOKEN_S + seen * PAIR_S * self.smaller) * self.smaller if plan.rows else 0.0
        )
        self.computed += plan.token_count
        self.computed_s = max(before_s, self.now_s) + own_s
        self.now_s += self.host_s(plan)
        self._in_flight.append((plan, self.computed_s))

    def apply(self) -> None:
        plan, end_s = self._in_flight.pop(0)
        if plan.rows:
            samples = any(row.samples for row in plan.rows)
            self.now_s = max(self.now_s, end_s) if samples else self.now_s + LAUNCH_S
        elif self._due:
            self.now_s = max(self.now_s, min(self._due)[0])
        over, self._due = (
            [one for one in self._due if one[0] <= self.now_s],
            [one for one in self._due if one[0] > self.now_s],
        )
        result = StepResult(
            step_id=plan.step_id,
            token_ids=[9 + plan.step_id % 900 for row in plan.rows if row.samples],
            finished_copies=[copy for _, copy, _ in over],
            host_pages=self.host_pages,
            loading_s=sum(loading_s for _, _, loading_s in over),
        )
        for output in self.scheduler.apply(result, self.now_s):
            if output.token_ids:
                self.first_s.setdefault(output.request_id, self.now_s)
                self.answered[output.request_id] = self.answered.get(output.request_id, 0) + 1
                self.told_s.setdefault(output.request_id, []).append(self.now_s)

    def settle(self) -> None:
        while self._in_flight:
            self.apply()
        while (waiting := self.scheduler.wait_for_copies()) is not None:
            self.launch(waiting)
            self.apply()


def open_world(pages: int, smaller: int, longest: int, **tiers: Any) -> World:
    groups, places = form_groups([None])
    layout = KVLayout(
        groups=groups, block_tokens=BLOCK, layers_per_page=places, kv_heads=1, head_dim=4, element_bytes=4
    )
    limits = SchedulerLimits(
        max_num_seqs=512, max_num_batched_tokens=8192 // smaller, max_model_len=longest, max_steps_in_flight=2
    )
    sizes = {"most_loading": 1024, "loads_a_plan": 256, "most_storing": 1024, "spare_pages": 2048, "saves_ahead": 32}
    scaled = {name: count // smaller for name, count in sizes.items()}
    return World(Scheduler(limits, KVCache(layout, pages + 1, True, TierLimits(**(scaled | LIMITS | tiers)))), smaller)


def stall_at(*steps: int) -> Callable[[StepPlan], float]:
    """Kernels are compiled, or a graph is captured: 3 s behind what these steps launch first. When their ends are seen,
    a step behind them may be over as well."""
    return lambda plan: 3.0 if plan.step_id in steps else 0.002
