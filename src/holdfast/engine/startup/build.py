"""From a config to an engine that can step: resolve, plan, load, profile run, KV pool.

`find_model` and `plan_model` need no torch (the front uses them, and refuses before anything is loaded); `build_core`
imports execution when it is called.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoints import (
    DEFAULT_MODEL,
    ModelFiles,
    StoredTensor,
    locate,
    locate_headers,
    match,
    open_checkpoint,
    spec_of,
)
from holdfast.checkpoints.sources.builtin import refuse_revision
from holdfast.checkpoints.sources.resolve import overridden, refuse_known, say_short_name
from holdfast.config import EngineConfig
from holdfast.engine.core.kv_store import OpenedStore, files_stamp, open_kv_store
from holdfast.engine.requests.adapters import check_lora_dtype
from holdfast.engine.startup.engine_info import engine_info
from holdfast.engine.startup.plan_lines import memory_report
from holdfast.engine.startup.unused_tensors import refuse_unclaimed, warn_of_unused
from holdfast.errors import (
    ConfigurationError,
    DoesNotFitError,
    EngineError,
    ModelAccessError,
    ModelNotFoundError,
)
from holdfast.footprint.cpu import staging_places
from holdfast.hardware import Memory, Resident, compiled_kernels, memory, memory_holders, processor, resident
from holdfast.hardware.nvidia import NvidiaGpu, probe
from holdfast.kvcache import KVCache, TierLimits
from holdfast.models import ModelSpec
from holdfast.models.families.classifier import FROM_TOKENS, TOKEN_IDS
from holdfast.planner import Plan, coming_bytes, largest_pool, make_cpu_plan, settle_pool
from holdfast.planner.models.requested import requested
from holdfast.planner.serve.shares.engines import gpus_share, one_share, ram_share, same_part
from holdfast.records import EngineInfo, LowerTier, MemoryReport
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.engine.core.loop import EngineCore
    from holdfast.engine.ranks.messages import Measured
    from holdfast.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("holdfast")

Progress = Callable[[str, int, int], None]
"""(stage, done, total): tensors while loading."""
Beat = Callable[[], None]


@dataclass(frozen=True, slots=True)
class FoundModel:
    files: ModelFiles
    spec: ModelSpec

    @property
    def in_gguf(self) -> bool:
        return self.files.format == "gguf"


def find_model(config: EngineConfig, *, progress: bool = True, text: bool = True) -> FoundModel:
    """Its files, fetched where they are not here. What a hub's headers show not to fit is not fetched. `text`: with
    a GGUF's vocabulary, and how the model is best sampled."""
    refuse_revision(config.model or DEFAULT_MODEL, config.revision)
    say_short_name(config.model, progress=progress)
    cache = _download_folder(config)
    try:
        headers = locate_headers(config.model, revision=config.revision, progress=progress, cache=cache, text=text)
    except (ModelAccessError, ModelNotFoundError):
        refuse_known(config.model or DEFAULT_MODEL)
        headers = None  # Fetching says best what is wrong.
    if headers is not None and headers.remote:
        plan_model(config, _checked(config, headers))
    if headers is None or headers.remote:
        headers = locate(config.model, revision=config.revision, progress=progress, cache=cache)
    return _checked(config, headers)


def _download_folder(config: EngineConfig) -> Path | None:
    return None if config.download_dir is None else Path(config.download_dir).expanduser()


def _with_token_ids(config: EngineConfig, files: ModelFiles) -> ModelFiles:
    """Of a classifier that is made of tokens: their ids, once there is a tokenizer that knows them."""
    said = files.config or {}
    tokens = said.get(FROM_TOKENS)
    if not isinstance(tokens, list) or TOKEN_IDS in said or files.remote:
        return files
    from holdfast.text.tokenizer.tokenizer import Tokenizer  # Of few models: the engine process has no use for text.

    source = files if config.tokenizer is None else locate(config.tokenizer, cache=_download_folder(config))
    tokenizer, ids = Tokenizer.from_files(source), list[int]()
    for token in tokens:
        token_id = tokenizer.backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise ConfigurationError(
                f"{FROM_TOKENS} has {shorten(str(token))!r}, which is no token of {files.name}",
                needed="tokens of its vocabulary, as they are spelled there",
                field="hf_overrides",
            )
        ids.append(token_id)
    return replace(files, config={**said, TOKEN_IDS: ids})


def _checked(config: EngineConfig, files: ModelFiles) -> FoundModel:
    files = _with_token_ids(config, overridden(files, config.config_overrides, config.overriding_settings))
    spec = replace(
        spec_of(files), pooling=files.pooling
    )  # First, because for a model that cannot be run no other advice helps.
    wanted = config.load_format
    if wanted in ("safetensors", "gguf") and files.format != wanted:
        raise ConfigurationError(
            f"load_format is {wanted}, but {files.name} is in {files.format} format",
            fix="leave load_format out",
            field="load_format",
        )
    if files.format == "none" and wanted != "dummy":
        raise ConfigurationError(
            f"{files.name} has a config but no weight files",
            needed="*.safetensors files beside config.json",
            fix="download the weights into it too: holdfast pull OWNER/NAME fetches every file; only to try settings,"
            " with random weights: --load-format dummy",
        )
    if wanted != "dummy" and files.format == "gguf":
        refuse_unclaimed(spec, files)
    # Before a plan, which may have other things to refuse, and before anything is fetched.
    found = FoundModel(files, spec)
    requested(config.asked_quantization, spec.quantization, gguf=found.in_gguf, name=config.model or files.name)
    return found


def plan_model(
    config: EngineConfig,
    model: FoundModel,
    *,
    front_bytes: int = 0,
    kernels: bool | None = None,
    engine_pids: Collection[int] = (),
    number: int = 0,
) -> Plan:
    """From headers and what is free now, or a DoesNotFitError that says who holds memory. No torch.

    `front_bytes`: of a process beside the engines', out of the same budget. `kernels`: whether there are compiled
    ones, where that is known better than it can be without torch. `engine_pids`: of engine processes that have begun
    already, whose memory is part of what is planned. `number`: of this engine, where there are several.
    """
    stored = _stored(config, model)
    if config.device == "cuda":
        from holdfast.planner.serve.gpu_plan import make_gpu_plan
        from holdfast.planner.serve.host_memory import with_host_memory
        from holdfast.planner.serve.kv_store_ram import with_kv_store

        front_bytes //= config.data_parallel_size
        host, gpus = one_share(memory(), config.data_parallel_size), gpus_share(config, probe().gpus, number)
        plan = make_gpu_plan(
            model.spec,
            stored,
            config,
            gpus,
            name=model.files.name,
            gguf=model.in_gguf,
            host=host,
            front_bytes=front_bytes,
            processor=processor(),
            compiled_kernels=compiled_kernels() if kernels is None else kernels,
        )
        if plan.engine.rank_gpus:
            config = replace(config, kv_ram=0, kv_offloading_size=None, swap_space=None)
        own = replace(config, ram=ram_share(config))
        return with_kv_store(with_host_memory(plan, own, host, front_bytes), own, host, front_bytes)
    known, machine = compiled_kernels() if kernels is None else kernels, memory()
    for pid in engine_pids:
        machine = _with_own(machine, resident(pid))

    def planned(with_memory: Memory) -> Plan:
        return make_cpu_plan(
            model.spec,
            stored,
            config,
            with_memory,
            processor(),
            name=model.files.name,
            gguf=model.in_gguf,
            compiled_kernels=known,
            front_bytes=front_bytes,
        )

    try:
        return planned(machine)
    except DoesNotFitError as error:
        holders = memory_holders()
        if not holders or not _fits(planned, replace(machine, available_bytes=machine.total_bytes)):
            raise  # Theirs would not help.
        found = f"{error.found}; others hold: {', '.join(holders)}"
        raise DoesNotFitError(
            error.message, code=error.code, needed=error.needed, found=found, fix=error.fix, field=error.field
        ) from None


def _with_own(machine: Memory, begun: Resident | None) -> Memory:
    """What is free, with what an engine process has taken already that is part of what is planned."""
    if begun is None:
        return machine
    free = machine.available_bytes + begun.now_bytes - begun.files_bytes
    return replace(machine, available_bytes=min(free, machine.total_bytes))


def _fits(planned: Callable[[Memory], Plan], machine: Memory) -> bool:
    try:
        planned(machine)
    except DoesNotFitError:
        return False
    return True


def _stored(config: EngineConfig, model: FoundModel) -> Mapping[str, StoredTensor] | None:
    return None if config.load_format == "dummy" else match(model.spec, open_checkpoint(model.files))


def plan_again(config: EngineConfig, model: FoundModel, plan: Plan, own_bytes: int) -> Plan:
    """For the same GPU with what is free on it now, of which this process holds `own_bytes` and will use them again, as
    it will its RAM."""
    assert plan.engine.gpu is not None
    gpus = [same_part(gpu, plan, own_bytes) for gpu in probe().gpus if gpu.uuid == plan.engine.gpu.uuid]
    if not gpus:
        raise EngineError(
            f"{plan.engine.gpu.name} is no longer available: the driver does not list it", found=plan.engine.gpu.uuid
        )
    return _planned_for(config, model, plan, gpus)


def _planned_for(
    config: EngineConfig, model: FoundModel, plan: Plan, gpus: Sequence[NvidiaGpu], *, of_ranks: bool = False
) -> Plan:
    """`of_ranks`: these are the GPUs of all ranks, on several nodes."""
    from holdfast.planner.serve.gpu_plan import make_gpu_plan
    from holdfast.planner.serve.host_memory import with_host_memory

    host, front_bytes = _with_own(memory(), resident()), plan.question.settings.front_bytes
    host = one_share(host, config.data_parallel_size)
    again = make_gpu_plan(
        model.spec,
        _stored(config, model),
        config,
        gpus,
        name=model.files.name,
        gguf=model.in_gguf,
        host=host,
        front_bytes=front_bytes,
        processor=processor(),
        compiled_kernels=compiled_kernels(),
        of_ranks=of_ranks,
    )
    if of_ranks:
        config = replace(config, kv_ram=0, kv_offloading_size=None, swap_space=None)
    return with_host_memory(again, replace(config, ram=ram_share(config)), host, front_bytes)


def open_tokenizer(config: EngineConfig, model: FoundModel) -> Tokenizer | None:
    """With what silently breaks people checked and said: vocabulary, ends, chat template."""
    from holdfast.text.load_checks import check_text
    from holdfast.text.templates.template import load_template
    from holdfast.text.tokenizer.tokenizer import Tokenizer  # The engine process has no use for text.

    if config.skip_tokenizer_init:
        return None
    files = model.files if config.tokenizer is None else locate(config.tokenizer, cache=_download_folder(config))
    template = None if config.chat_template is None else load_template(config.chat_template)
    tokenizer = Tokenizer.from_files(files, chat_template=template)
    for warning in check_text(model.spec, tokenizer, model.files):
        log.warning("%s", warning)
    return tokenizer


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """torch's import makes a million objects that stay: looking through them again and again takes a tenth of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def build_core(
    config: EngineConfig,
    model: FoundModel,
    progress: Progress,
    plan: Plan | None = None,
    beat: Beat | None = None,
    tier_file: int | None = None,
    again: bool = False,
) -> tuple[EngineCore, EngineInfo]:
    """`plan`: as another process made it; None: it is made here. `beat`: called while a step is computed on a CPU, or
    waits for a disk. `tier_file`: whose memory KV pages in RAM beside a GPU have; None: the engine's own. `again`: it
    takes the place of one that has served."""
    with _without_collector():
        from holdfast.engine.core.loop import EngineCore
        from holdfast.engine.ranks.nodes.open import available_bytes, join_nodes
        from holdfast.engine.ranks.together import load_ranks
        from holdfast.engine.startup.streamed_layers import lower_tiers
        from holdfast.execution import native
        from holdfast.execution.tiers.cpu import CpuPageCopies

    if plan is None or (plan.engine.compiled and not native.available()):
        plan = plan_model(config, model, kernels=native.available())
    if config.load_format != "dummy":
        warn_of_unused(model.spec, model.files)
    check_lora_dtype(config, plan.dtype)
    if plan.engine.gpu is not None:
        return _build_on_gpu(config, model, progress, plan, beat, tier_file, again)
    cores, loaded_from = config.threads or processor().cores, files_stamp(config, model.files)
    hub, plan = join_nodes(config, model.files, _still_fits(config, plan), progress, again=again)
    ranks = load_ranks(config, model.files, model.spec, plan, progress, cores=cores, beat=beat, hub=hub)
    runner, core_runner = ranks.runner, ranks.step_runner
    try:
        plan = replace(plan, decisions=(*plan.decisions, *ranks.decisions))
        progress("profile_run", 0, 0)
        ranks.back_kv(2)
        measured, profile_run_s = ranks.profile_run()
        plan = replace(plan, decisions=(*plan.decisions, *ranks.find_kv_scales(config, model.files)))
        plan, report = _settled(plan, measured, lower_tiers(config, plan), available_bytes(config, plan, measured))
        report = msgspec.structs.replace(report, ranks=ranks.rows(model.spec, plan, measured))
        ranks.serve(plan.engine.blocks, largest_pool(plan, memory().total_bytes * config.nnodes))
        opened = open_kv_store(config, model.files, model.spec, plan, runner.kv_scales.digest_parts(), loaded_from)
    except BaseException:
        core_runner.close()
        raise
    limits_below = None
    if opened is not None:
        plan = replace(plan, decisions=(*plan.decisions, opened.decision))
        runner.use_tiers(CpuPageCopies(opened.store, plan.engine.layout.page_bytes))
        limits_below = TierLimits(most_loading_disk=staging_places(plan.engine.layout.page_bytes), storing_share=1 / 8)
    ahead = ranks.steps_ahead
    scheduler = _scheduler(config, plan, steps_ahead=ahead, apart=ahead > 0, tiers=limits_below, opened=opened)
    store_use = None if opened is None else opened.use
    core = EngineCore(
        scheduler,
        core_runner,
        steps_ahead=ahead,
        link_use=None if plan.engine.streamed is None else runner.link_use,
        store_use=store_use,
        check_ranks=ranks.check,
    )
    return core, engine_info(config, model.files, model.spec, plan, runner, report, profile_run_s)


def _build_on_gpu(
    config: EngineConfig,
    model: FoundModel,
    progress: Progress,
    plan: Plan,
    beat: Beat | None,
    tier_file: int | None,
    again: bool = False,
) -> tuple[EngineCore, EngineInfo]:
    from holdfast.engine.core.kv_balance import KVBalance
    from holdfast.engine.core.loop import EngineCore
    from holdfast.engine.core.pool_memory import breathe_in_vram
    from holdfast.engine.startup.build_gpu import build_gpu_runner, use_kv_tiers

    if plan.engine.rank_gpus:
        return _build_on_gpus(config, model, progress, plan, beat, again)
    first, loaded_from = plan, files_stamp(config, model.files)
    runner, plan, report, vram = build_gpu_runner(
        config,
        model.files,
        model.spec,
        first,
        progress,
        lambda own_bytes: plan_again(config, model, first, own_bytes),
        beat,
    )
    opened = open_kv_store(config, model.files, model.spec, plan, runner.kv_scales.digest_parts(), loaded_from)
    if opened is not None:
        plan = replace(plan, decisions=(*plan.decisions, opened.decision))
    tiers = use_kv_tiers(plan, runner, None if opened is None else opened.store, tier_file, config.data_parallel_size)
    core = EngineCore(
        _scheduler(config, plan, steps_ahead=1, tiers=tiers, opened=opened),
        runner,
        steps_ahead=1,
        store_use=None if opened is None else opened.use,
        vram=vram,
        link_use=runner.link_use,
        expert_use=None if plan.engine.expert_places is None else runner.expert_use,
        kv_balance=KVBalance(vram) if runner.movable_layers is not None and _balances(config, plan) else None,
    )
    breathe_in_vram(core, config, plan, vram)
    return core, engine_info(config, model.files, model.spec, plan, runner, report)


def _build_on_gpus(
    config: EngineConfig, model: FoundModel, progress: Progress, plan: Plan, beat: Beat | None, again: bool
) -> tuple[EngineCore, EngineInfo]:
    """Of several ranks, each with a GPU."""
    from holdfast.engine.core.loop import EngineCore
    from holdfast.engine.ranks.gpu.together import build_gpu_ranks
    from holdfast.engine.ranks.nodes.open import join_gpu_nodes

    def planned(gpus: Sequence[NvidiaGpu]) -> Plan:
        return _planned_for(config, model, plan, gpus, of_ranks=True)

    hub, plan = join_gpu_nodes(config, model.files, plan, progress, planned, again=again)
    built = build_gpu_ranks(config, model.files, model.spec, plan, progress, beat, hub)
    ahead, staged = built.steps_ahead, bool(built.plan.engine.stages)
    scheduler = _scheduler(config, built.plan, steps_ahead=ahead, apart=staged)
    core = EngineCore(scheduler, built.runner, steps_ahead=ahead, vram=built.vram, check_ranks=built.runner.check_ranks)
    return core, engine_info(config, model.files, model.spec, built.plan, built.first.runner, built.report)


def _balances(config: EngineConfig, plan: Plan) -> bool:
    """Whether KV and layers may change places by themselves: neither was set by hand."""
    return config.kv_cache_memory_bytes is None and not plan.question.settings.offload.by_hand


def _still_fits(config: EngineConfig, plan: Plan) -> Plan:
    """Held against what is free now: the plan may be minutes old, and a download may lie between. Of several nodes that
    is done when they have joined."""
    if config.nnodes > 1:
        return plan
    coming = coming_bytes({name: size for name, size in plan.terms.items() if name != "kv_pool"})
    return settle_pool(plan, memory().available_bytes - coming)


def _settled(
    plan: Plan, ranks: Sequence[Measured], below: list[LowerTier], available: int
) -> tuple[Plan, MemoryReport]:
    """The pool by what is measured of all ranks, and the books of it. `available`: for it and for what stays free."""
    base_names = ("framework", "libraries")
    measured = {name: sum(rank.terms.get(name, 0) for rank in ranks) for name in ranks[0].terms}
    # Pages of files are the same in all of them.
    measured["libraries"] = max(rank.terms["libraries"] for rank in ranks)
    # In a process of somebody else's, what was there before is not ours to answer for.
    left_out = {"buffers", *(() if "front" in plan.terms else base_names)}
    own = {name: size for name, size in measured.items() if name not in left_out}
    own["activations"] += _not_spare(plan, own, sum(rank.nameless_bytes for rank in ranks))
    settled = settle_pool(plan, available, own)
    return settled, memory_report(plan, settled, ranks, measured, below)


def _not_spare(plan: Plan, measured: Mapping[str, int], nameless_bytes: int) -> int:
    """Of what terms left of their plan, what the pool may not have: it is held and no term accounts for it, or it may
    still come of libraries, which are read when they are first used."""
    left = {name: plan.terms.get(name, 0) - size for name, size in measured.items()}
    coming = sum(max(0, left.get(name, 0)) for name in ("framework", "libraries"))
    return max(0, min(sum(left.values()), coming + max(0, nameless_bytes)))


def _scheduler(
    config: EngineConfig,
    plan: Plan,
    steps_ahead: int = 0,
    apart: bool = False,
    tiers: TierLimits | None = None,
    opened: OpenedStore | None = None,
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        max_model_len=plan.limits.max_model_len,
        prompt_tokens_beside=plan.engine.prompt_tokens_beside,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        max_steps_in_flight=1 + steps_ahead,
        apart=apart,
        max_loras=config.lora_places,
    )
    if tiers is not None and opened is not None:
        tiers = replace(tiers, disk_share=opened.disk_share)
    engine, stored = plan.engine, None if opened is None else opened.store
    return Scheduler(limits, KVCache(engine.layout, engine.blocks, config.enable_prefix_caching, tiers, stored))


def with_located_model(config: EngineConfig, model: FoundModel) -> EngineConfig:
    """So that the engine process opens the very files that the front has found, and downloads nothing."""
    return replace(config, model=str(model.files.path), revision=None)
