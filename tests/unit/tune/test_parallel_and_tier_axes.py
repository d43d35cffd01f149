"""Sizes of parallelism and tiers for KV as settings that are varied: which are looked at on which machine, what the
planner rules out of them, and that an optimum planted on each of them is found. No server is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.bench.load.load import Arrival
from holdfast.errors import ConfigurationError
from holdfast.tune.configuration import DEFAULT, ServerConfiguration, command_of
from holdfast.tune.measure import ServerTrials, TrialSettings, with_empty_store
from holdfast.tune.space.axes import TuneSpace, space_of
from holdfast.tune.space.kv_tiers import CommonPrefixes
from holdfast.tune.space.plans import Planner
from holdfast.tune.space.pruning import (
    REFUSED,
    SAME,
    SLOWER,
    PrunedAgainst,
    Survivors,
    configuration_at,
    most_goodput,
    survivors,
)
from holdfast.tune.trial import BETTER, ONLY, Stage, Trial, TuneOutcome
from holdfast.tune.tuner import Tuner

TRIAL_S, OFFERED = 10.0, 100.0
CUT = "VLLM_PP_LAYER_PARTITION"
SHORT = [Arrival(0.1 * at, 100, 20) for at in range(40)]
LONG = [Arrival(0.1 * at, 3000, 1000) for at in range(200)]
NOTHING_IN_COMMON, SEVERAL = CommonPrefixes(), CommonPrefixes(tokens=4000, count=80)


class Machine:
    """What is varied on it, and what is left of that."""

    def __init__(
        self, model: str, engine: str = "holdfast", *, arrivals: list[Arrival] = SHORT, cores: int = 8, nodes: int = 1,
        prefixes: CommonPrefixes = NOTHING_IN_COMMON, kv_store: str | None = None, **settings: str,
    ) -> None:  # fmt: skip
        self.engine, self.planner = engine, Planner(model, engine=engine, settings=settings)
        self.arrivals, self.prefixes = arrivals, prefixes
        default = self.planner.plan(DEFAULT)
        self.space: TuneSpace = space_of(
            default, arrivals, engine=engine, kv_store=kv_store, cores=cores, memory_nodes=nodes,
            # What these tests are not about, and takes long to plan with all else.
            fixed=frozenset({"max_model_len", "gpu_memory_utilization", "max_num_batched_tokens"}),
        )  # fmt: skip

    @property
    def values(self) -> dict[str, tuple[object, ...]]:
        return {axis.name: axis.values for axis in self.space.axes}

    def left(self) -> Survivors:
        against = PrunedAgainst(
            arrivals=self.arrivals, engine=self.engine, headroom=0.05, prefixes=self.prefixes,
            most_ranks=self.space.most_ranks,
        )  # fmt: skip
        return survivors(self.space.axes, self.planner, against)

    def kind_of(self, **changes: int | str) -> str:
        """Of pruning; empty: it is worth a run."""
        axes = [axis for axis in self.space.axes if axis.name in changes]
        point = tuple(axis.values.index(changes[axis.name]) for axis in axes)
        against = PrunedAgainst(
            arrivals=self.arrivals, engine=self.engine, headroom=0.05, prefixes=self.prefixes,
            most_ranks=self.space.most_ranks,
        )  # fmt: skip
        found = survivors(axes, self.planner, against)
        if found.servers[found.same_as.get(point, 0)].point == point:
            return ""
        named = f"{configuration_at(axes, point)}: "
        return next(one.kind for one in found.pruned if one.example.startswith(named))


def tuned(found: Survivors, worth: Callable[[ServerConfiguration], float | None]) -> TuneOutcome:
    """With a server that answers what `worth` says, and time for 60 trials."""
    now_s = 0.0

    def measure(configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
        nonlocal now_s
        now_s += TRIAL_S
        value = worth(configuration)
        died = "" if value is not None else "out of memory"
        return Trial(
            configuration=configuration, stage=stage, speed=speed, climb=climb, goodput=value or 0.0, requests=100,
            died=died,
            good_share=(value or 0.0) / OFFERED, times_limit=OFFERED / value if value else None, seconds=TRIAL_S,
        )  # fmt: skip

    return Tuner(lambda *pace: found, measure, budget_s=60 * TRIAL_S, speed=1.0, clock=lambda: now_s).run()


def size(configuration: ServerConfiguration, name: str) -> int:
    return int(configuration.value(name) or 1)


def of_sizes(configuration: ServerConfiguration) -> float:
    """Two GPUs a replica are best, and stages are worse than either."""
    tensor, pipeline, data = (
        size(configuration, f"{name}_parallel_size") for name in ("tensor", "pipeline", "data")
    )  # fmt: skip
    return 5.0 * {1: 1.0, 2: 1.5, 4: 1.6}[tensor] * {1: 1.0, 2: 1.9, 4: 2.0}[data] * {1: 1.0, 2: 0.9, 4: 0.8}[pipeline]


def test_sizes_for_vllm_on_several_gpus_are_searched_together() -> None:
    machine = Machine("llama-3.1-8b", "vllm", gpu="h100-80x4")
    assert machine.values["tensor_parallel_size"] == machine.values["data_parallel_size"] == (None, 2, 4)
    found = machine.left()
    ranks = [of_all for one in found.configurations if (of_all := _ranks(one))]
    assert max(ranks) == 4  # More than there are GPUs are refused.
    outcome = tuned(found, of_sizes)
    assert outcome.verdict == BETTER
    assert outcome.kept is not None
    assert dict(outcome.kept.changes).items() >= {"tensor_parallel_size": 2, "data_parallel_size": 2}.items()


def _ranks(configuration: ServerConfiguration) -> int:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return size(configuration, names[0]) * size(configuration, names[1]) * size(configuration, names[2])


def test_a_model_that_is_too_large_for_one_gpu_is_divided() -> None:
    """The engine takes one GPU by itself, so that the plan of the default is of one."""
    machine = Machine("llama-3.1-70b", "vllm", gpu="h100-80x4")
    found = machine.left()
    assert all(_ranks(one) >= 2 for one in found.configurations[1:])
    assert all(size(one, "data_parallel_size") < 4 for one in found.configurations)
    outcome = tuned(
        found,
        lambda one: (
            of_sizes(one) if size(one, "tensor_parallel_size") * size(one, "pipeline_parallel_size") > 1 else None
        ),
    )
    assert outcome.verdict == ONLY
    assert outcome.kept is not None
    assert size(outcome.kept, "tensor_parallel_size") >= 2


def test_gpus_of_ours_are_divided_among_engines_and_ranks() -> None:
    machine = Machine("llama-3.1-8b", gpu="h100-80x4")
    assert {machine.values[f"{name}_parallel_size"] for name in ("data", "tensor", "pipeline")} == {(None, 2, 4)}
    found = machine.left().configurations
    assert any(size(one, "tensor_parallel_size") == 4 for one in found)
    assert any(size(one, "tensor_parallel_size") == size(one, "data_parallel_size") == 2 for one in found)
    assert all(size(one, "tensor_parallel_size") * size(one, "data_parallel_size") <= 4 for one in found)
    burst = [Arrival(0.0, 100, 200)] * 1000
    one, four = (
        most_goodput(machine.planner.plan(chosen), burst, 1.0)
        for chosen in (DEFAULT, ServerConfiguration((("data_parallel_size", 4),)))
    )
    assert one is not None
    assert four == pytest.approx(4 * one, rel=0.05)  # Else four would be ruled out by what one cannot exceed.
    outcome = tuned(machine.left(), lambda chosen: 5.0 * size(chosen, "data_parallel_size"))
    assert outcome.kept is not None
    assert outcome.kept.value("data_parallel_size") == 4


def test_ranks_on_a_cpu_are_looked_at_where_it_has_several_memories() -> None:
    machine = Machine("smollm2", cores=16, nodes=2)
    assert machine.values["tensor_parallel_size"] == machine.values["pipeline_parallel_size"] == (None, 2)
    assert machine.kind_of(tensor_parallel_size=2) == ""
    assert machine.kind_of(tensor_parallel_size=2, pipeline_parallel_size=2) == SLOWER
    outcome = tuned(machine.left(), lambda one: 8.0 if one.value("tensor_parallel_size") == 2 else 5.0)
    assert outcome.verdict == BETTER
    assert outcome.kept == ServerConfiguration((("tensor_parallel_size", 2),))


def test_on_one_memory_only_engines_with_some_cores_each_are_looked_at() -> None:
    many, few = Machine("smollm2", cores=16), Machine("smollm2", cores=4)
    assert many.values["data_parallel_size"] == (None, 2, 4)
    assert "tensor_parallel_size" not in many.values
    assert few.values.keys() == {"max_num_seqs"}
    assert {name for one in few.space.left_out for name in one.names} >= {"tensor_parallel_size", "data_parallel_size"}
    outcome = tuned(many.left(), lambda one: 5.0 + size(one, "data_parallel_size"))
    assert outcome.kept is not None
    assert outcome.kept.value("data_parallel_size") == 4


def test_ram_for_kv_is_searched_where_the_pool_does_not_hold_the_traffic() -> None:
    machine = Machine("llama-3.1-8b", arrivals=LONG, gpu="l4", ram="200GiB")
    none, by_itself, most = machine.values["kv_ram"]
    assert (none, by_itself) == ("0", None)
    assert isinstance(most, str)
    assert machine.kind_of(kv_ram=most) == ""
    outcome = tuned(machine.left(), lambda one: {none: 3.0, most: 8.0}.get(one.value("kv_ram"), 5.0))
    assert outcome.verdict == BETTER
    assert outcome.kept == ServerConfiguration((("kv_ram", most),))


def test_ram_for_kv_is_the_same_server_where_the_pool_holds_all() -> None:
    machine = Machine("llama-3.1-8b", gpu="h100-80", ram="200GiB")
    assert machine.kind_of(kv_ram="0") == SAME
    on_cpu = Machine("smollm2")
    assert "kv_ram" not in on_cpu.values
    assert any(one.names == ("kv_ram",) and "RAM already" in one.why for one in on_cpu.space.left_out)


def test_what_prompts_have_in_common_is_counted_among_what_the_pool_holds() -> None:
    """40 short requests and 320,000 tokens that they share 80 ways: more than this pool has."""
    assert Machine("llama-3.1-8b", gpu="l4", ram="200GiB").kind_of(kv_ram="0") == SAME
    assert Machine("llama-3.1-8b", gpu="l4", ram="200GiB", prefixes=SEVERAL).kind_of(kv_ram="0") == ""


def test_vllm_is_told_what_offloads_beside_the_size() -> None:
    machine = Machine("llama-3.1-8b", "vllm", arrivals=LONG, gpu="l4", ram="200GiB")
    sizes = machine.values["kv_offloading_size"]
    assert sizes[0] is None
    assert len(sizes) == 3
    outcome = tuned(machine.left(), lambda one: 8.0 if one.value("kv_offloading_size") == sizes[2] else 5.0)
    assert outcome.kept is not None
    assert command_of(outcome.kept, engine="vllm", model="m", flags=[]).endswith(
        f"--kv-offloading-size {sizes[2]} --kv-offloading-backend native"
    )


def test_pages_on_a_disk_are_searched_where_prompts_share_more_than_the_pool_holds() -> None:
    machine = Machine("smollm2", prefixes=SEVERAL, kv_store="/disk/kv")
    assert machine.kind_of(kv_store="/disk/kv") == ""
    outcome = tuned(machine.left(), lambda one: 8.0 if one.value("kv_store") else 5.0)
    assert outcome.kept == ServerConfiguration((("kv_store", "/disk/kv"),))
    few = CommonPrefixes(tokens=100, count=2)
    assert Machine("smollm2", prefixes=few, kv_store="/disk/kv").kind_of(kv_store="/disk/kv") == SLOWER
    assert Machine("smollm2", kv_store="/disk/kv").kind_of(kv_store="/disk/kv") == SLOWER
    ranks = Machine("smollm2", prefixes=SEVERAL, kv_store="/disk/kv", nodes=2)
    assert ranks.kind_of(tensor_parallel_size=2, kv_store="/disk/kv") == REFUSED  # As serve refuses it.


def test_a_trial_with_a_store_has_an_empty_one_of_its_own(tmp_path: Path) -> None:
    named = tmp_path / "kv"
    chosen = ServerConfiguration((("kv_store", str(named)), ("max_num_seqs", 8)))
    with with_empty_store(chosen) as started:
        own = Path(str(started.value("kv_store")))
        assert own.is_dir()
        assert own.parent == named  # Beside it may be another disk.
        assert started.value("max_num_seqs") == 8
        (own / "pages").write_text("KV")
    assert list(named.iterdir()) == []
    with with_empty_store(DEFAULT) as same:
        assert same is DEFAULT


def test_a_trial_without_room_for_its_store_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    chosen = ServerConfiguration((("kv_store", str(tmp_path / "file" / "kv")),))
    settings = TrialSettings(engine="holdfast", model="no-such-model", arrivals=(), seconds=1.0, objectives=())
    trial = ServerTrials(settings)(chosen, speed=1.0, stage="search")
    assert trial.died.startswith("no folder for its KV store: ")
    assert trial.configuration == chosen


@pytest.mark.parametrize("gpu", ["h100-80", "h100-80x2"])
def test_a_model_with_layers_in_ram_has_settings_to_choose_too(gpu: str) -> None:
    machine = Machine("llama-3.1-70b", gpu=gpu, ram="300GiB")
    found = machine.left()
    assert len(found.servers) > 1
    assert all(one.plan is not None and one.plan.question.settings.streamed_layers for one in found.servers)
    outcome = tuned(found, lambda one: 8.0 if one.value("max_num_seqs") == machine.values["max_num_seqs"][0] else 5.0)
    assert outcome.kept is not None
    assert outcome.kept.value("max_num_seqs") == machine.values["max_num_seqs"][0]


@pytest.mark.parametrize(("cut", "layers"), [(None, [40, 40]), ("56,24", [56, 24])])
def test_stages_of_vllm_are_planned_as_its_trials_cut_them(
    cut: str | None, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial is started without a variable of its own, and with those of this process."""
    monkeypatch.delenv(CUT, raising=False)
    if cut is not None:
        monkeypatch.setenv(CUT, cut)
    settings = {"gpu": "l40s,l4", "max_model_len": "8192"}
    staged = ServerConfiguration((("pipeline_parallel_size", 2),))
    found = Planner("llama-3.1-70b-awq", engine="vllm", settings=settings).plan(staged)
    assert [len(one) for one in found.stage_layers] == layers
    assert found.fits == (cut is not None)
    if cut is not None:  # A size that it is no cut for would not start.
        monkeypatch.setenv(CUT, "30,30,20")
        with pytest.raises(ConfigurationError, match="does not say how many layers"):
            Planner("llama-3.1-70b-awq", engine="vllm", settings=settings).plan(staged)
    own = Planner("llama-3.1-70b-awq", engine="holdfast", settings=settings).plan(staged)
    assert [len(one) for one in own.stage_layers] == [56, 24]
