"""`LLM`: the engine in the caller's own process, for scripts. vLLM's names and shapes.

The loop runs while `generate` runs; dropping the object (or `close()`) gives its memory back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.config import EngineConfig
from holdfast.config.parts.profiler import read_profiler_config
from holdfast.config.python_words import tells_scripts
from holdfast.config.setting import Origin, without_effect
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import make_structured_outputs
from holdfast.engine.interface import check_wake_tags
from holdfast.engine.offline.beams import BeamMethods
from holdfast.engine.offline.pooling import PoolingMethods, Prompt
from holdfast.engine.offline.profiling import ProfileMethods
from holdfast.engine.offline.prompts import as_list, one_each
from holdfast.engine.offline.queued import QueuedMethods
from holdfast.engine.offline.stepped import SteppedEngine
from holdfast.engine.offline.unsupported import AbsentMethods, EmptyMethods, refuse_breathing, refuse_several_engines
from holdfast.engine.ranks.ray_cluster.launch import on_ray
from holdfast.engine.requests.adapters import Adapters
from holdfast.engine.requests.admission import Admission
from holdfast.engine.requests.embedding import PARAMS
from holdfast.engine.requests.output import OutputBuilder
from holdfast.engine.requests.sampling_defaults import decided, default_sampling
from holdfast.engine.requests.structured_output import StructuredOutput
from holdfast.engine.requests.whole_vocabulary import is_whole, with_whole_vocabulary
from holdfast.engine.startup.build import FoundModel, build_core, find_model, open_tokenizer, plan_model
from holdfast.engine.startup.plan_lines import plan_line, warn_if_short, weights_line
from holdfast.engine.startup.preload_torch import preload_torch
from holdfast.engine.startup.progress import LoadProgress, RequestProgress
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import (
    EngineError,
    GrammarError,
    HoldfastError,
    NotFiniteError,
    RequestError,
    SleepingError,
    StepMemoryError,
    UnsupportedOptionError,
)
from holdfast.observability.metrics.snapshot import Metric, snapshot
from holdfast.records import (
    AdapterRef,
    AnswerDelta,
    CompletionOutput,
    EngineInfo,
    EngineStats,
    FinishReason,
    LoRARequest,
    RequestOutput,
    SamplingParams,
)
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.wire import GrammarCost
from holdfast.text.tokenizer.tokenizer import Tokenizer
from holdfast.text.tools.prompt import shown_in

if TYPE_CHECKING:
    from holdfast.engine.arg_utils import EngineArgs

log = logging.getLogger("holdfast")

Message = Mapping[str, Any]
_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids"})


class LLM(PoolingMethods, BeamMethods, ProfileMethods, QueuedMethods, EmptyMethods, AbsentMethods):
    """All keyword arguments are settings of `holdfast serve`, spelled with underscores: see EngineConfig."""

    @tells_scripts
    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._core: EngineCore | None = None
        self._nodes = contextlib.ExitStack()
        self._profiler_config = read_profiler_config(settings.pop("profiler_config", None))
        config = EngineConfig.from_arguments(model=model, **settings)
        refuse_breathing(config)
        refuse_several_engines(config)
        taken = without_effect(settings, lambda name: Origin(str))
        if taken is not None:
            log.warning("%s", taken)
        config = settle_device(config)
        found = find_model(config)
        config = self._nodes.enter_context(on_ray(config, found.files.name))
        try:
            self._start(config, found)
        except BaseException:
            self._nodes.close()
            raise

    def _start(self, config: EngineConfig, found: FoundModel) -> None:
        plan = plan_model(config, found)
        print(plan_line(found.files.name, plan), weights_line(plan), sep="\n", file=sys.stderr, flush=True)
        warn_if_short(plan)
        preload_torch()  # After the plan, which counts what is free.
        self._tokenizer = open_tokenizer(config, found)
        defaults = default_sampling(config, found.files)
        self._defaults = SamplingParams(**defaults)
        self._config, self._found = config, found
        with LoadProgress() as shown:
            self._core, info = build_core(config, found, shown, plan)
        self._structured = self._enable_structured_output(self._core)
        self.info = self._with_sampling(info)
        self._policy = config.scheduling_policy
        self._sleeping = False
        seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._door = Admission(found.spec, self.info.max_model_len, seeds, self._tokenizer, clamp_output=True)
        self._door.grammar_cost = self._grammar_cost
        self._adapters = Adapters(found.spec, found.files.name, config)
        self._names = itertools.count()
        self._turn = threading.Lock()

    info: EngineInfo

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**engine_args.settings())

    @tells_scripts
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. A prompt that cannot be taken raises before anything is computed."""
        if prompt_token_ids is not None:
            prompts = [{"prompt_token_ids": ids} for ids in prompt_token_ids]
        listed, chosen = self._asked(prompts, sampling_params)
        self._check_priority(priority, len(listed))
        adapters = self._adapters.one_each(lora_request, len(listed))
        adapters_of_runs = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(listed)
        runs = [
            self._prepare(prompt, params, 0 if priority is None else priority[place], adapter=adapters[place])
            for place, (prompt, params) in enumerate(zip(listed, chosen, strict=True))
        ]
        for run, request in zip(runs, adapters_of_runs, strict=True):
            run.output.lora_request = request
        if any(map(is_whole, chosen)):  # A step has room for one of these.
            return [output for run in runs for output in self._run([run], use_tqdm)]
        return self._run(runs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or several. `tools` are shown to the model; its calls are in its text, as it wrote them."""
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = self._chat_prompts(messages, template)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def _asked(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        listed = as_list(prompts)
        return listed, one_each(self._defaults if sampling_params is None else sampling_params, len(listed))

    def _chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], template: Mapping[str, Any]
    ) -> list[Prompt]:
        """`template`: what `chat` takes that makes up its prompts, by name."""
        if not messages:
            raise RequestError("there are no messages", needed="at least one", field="messages")
        several = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        tools, continued = template.get("tools"), bool(template.get("continue_final_message"))
        source = tokenizer.template_source(template.get("chat_template"), tools)
        texts = [
            str(
                tokenizer.apply_chat_template(
                    *shown_in(source, conversation, tools),
                    tokenize=False,
                    chat_template=source,
                    add_generation_prompt=template.get("add_generation_prompt", True) and not continued,
                    continue_final_message=continued,
                    **dict(template.get("chat_template_kwargs") or {}),
                )
            )
            for conversation in several
        ]
        # The template writes bos itself.
        return [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
        ]

    def _pool(
        self, prompts: Prompt | Sequence[Prompt], show_progress: bool
    ) -> list[tuple[RequestOutput, bytes | None]]:
        """What the engine tells of each prompt in place of an answer."""
        runs = [self._prepare(prompt, PARAMS, 0, embed=True) for prompt in as_list(prompts)]
        self._run(runs, show_progress)
        return [(run.output, run.embedding) for run in runs]

    @property
    def _embedding_size(self) -> int:
        return self._found.spec.hidden_size

    def _prompt_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        return [list(self._read_prompt(prompt)[1]) for prompt in as_list(prompts)]

    def _with_sampling(self, info: EngineInfo) -> EngineInfo:
        files = self._found.files
        return decided(info, self._config, default_sampling(self._config, files), advised=bool(files.generation_config))

    def _continue(
        self, prompts: list[list[int]], params: SamplingParams, lora_request: LoRARequest | None, show_progress: bool
    ) -> list[RequestOutput]:
        return self.generate(prompts, params, lora_request=lora_request, use_tqdm=show_progress)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where it is given none: as the model's makers advise."""
        return self._defaults.clone()

    @functools.cached_property
    def llm_engine(self) -> SteppedEngine:
        """The same engine, stepped by hand."""
        return SteppedEngine(self)

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError("there is no tokenizer", fix="leave skip_tokenizer_init out")
        return self._tokenizer

    def get_stats(self) -> EngineStats:
        return self._engine().stats()

    def get_metrics(self) -> list[Metric]:
        """vLLM's names; what `get_stats` says."""
        return snapshot(self.get_stats(), self.info.model)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Requests that run keep their blocks, also where vLLM would recompute them: weights never change here."""
        with self._turn:  # A thread that generates changes the same books.
            self._engine().scheduler.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives weights and pages back until `wake_up`, which loads them again; at both of vLLM's levels."""
        if level not in (1, 2):
            raise UnsupportedOptionError(f"level {level} is not supported", needed="1 or 2", field="level")
        with self._turn:
            if not self._sleeping:
                self._engine()
                self._refuse_if_stepped()
                self._release()
                self._sleeping = True

    @tells_scripts
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """With what memory is free now: limits that were not set may be others than before."""
        if tags is not None:
            check_wake_tags(tags)
        with self._turn:
            if not self._sleeping:
                return
            with LoadProgress() as shown:
                self._core, info = build_core(self._config, self._found, shown)
            self._structured = self._enable_structured_output(self._core)
            self.info = self._with_sampling(info)
            self._door.max_model_len = self.info.max_model_len
            self._sleeping = False

    def _enable_structured_output(self, core: EngineCore) -> StructuredOutput | None:
        """Its processes are started when the first answer must follow a grammar."""
        structured = StructuredOutput.of(self._tokenizer, self._found.spec)
        if structured is not None:
            core.structured_output = make_structured_outputs(
                core.scheduler.limits, self._found.spec, lambda: structured.service.address, on_device=core.on_device
            )
        return structured

    def _grammar_cost(self, params: StructuredOutputsParams) -> GrammarCost | None:
        return None if self._structured is None else self._structured.checker.check(params)

    def is_sleeping(self) -> bool:
        return self._sleeping

    def close(self) -> None:
        """Gives weights, pages and nodes back. The object is of no use afterwards."""
        self._release()
        self._nodes.close()

    def _release(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()
            if self._structured is not None:
                self._structured.close()
            gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None:
            core.close()
        if (nodes := getattr(self, "_nodes", None)) is not None:
            nodes.close()

    def _engine(self) -> EngineCore:
        if self._core is None and self._sleeping:
            raise SleepingError("this LLM is sleeping", fix="wake_up()")
        if self._core is None:
            raise EngineError("this LLM was closed", fix="create a new LLM")
        return self._core

    def _refuse_if_stepped(self) -> None:
        if "llm_engine" in vars(self) and self.llm_engine.has_unfinished_requests():
            raise EngineError("llm_engine has unfinished requests", fix="step it to their ends, or abort_request")

    def _check_priority(self, priority: Sequence[int] | None, prompts: int) -> None:
        if priority is None:
            return
        if self._policy != "priority" and any(priority):
            raise UnsupportedOptionError(
                "priority is given, but requests are served first come, first served",
                fix='LLM(scheduling_policy="priority")',
                field="priority",
            )
        if len(priority) != prompts:
            raise RequestError(
                f"got {prompts} prompts and {len(priority)} priorities", needed="one for each prompt", field="priority"
            )

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        *,
        embed: bool = False,
        adapter: AdapterRef | None = None,
    ) -> _Run:
        text, ids = self._read_prompt(prompt)
        params = params.checked()  # Scripts change theirs, also between two calls.
        params = with_whole_vocabulary(params, ids, self._found.spec.vocab_size, self._config.max_logprobs)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer", fix="leave skip_tokenizer_init out", field="stop")
        name = str(next(self._names))
        requests = self._door.admit(ids, params, request_id=name, priority=priority, adapter=adapter, embed=embed)
        answers = [OutputBuilder(request, index, self._tokenizer) for index, request in enumerate(requests)]
        return _Run(RequestOutput(request_id=name, prompt=text, prompt_token_ids=list(ids), outputs=[]), answers)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            other = next((name for name in prompt if name not in _PROMPT_KEYS and prompt[name] is not None), None)
            if other is not None and _PROMPT_KEYS & prompt.keys():
                raise UnsupportedOptionError(
                    f"{str(other)[:100]} in a prompt is not supported: only text input and output are",
                    needed='{"prompt": text} or {"prompt_token_ids": [...]}',
                    fix=f"leave {str(other)[:100]} out",
                    field="prompts",
                )
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self.get_tokenizer().encode(prompt["prompt"])
            raise RequestError(
                f"a prompt with the keys {', '.join(map(str, prompt)) or 'none'} is not valid",
                needed='text, {"prompt": text} or {"prompt_token_ids": [...]}',
                field="prompts",
            )
        return None, prompt

    def _run(self, runs: list[_Run], show_progress: bool) -> list[RequestOutput]:
        with self._turn:  # Of several threads one after the other: a step belongs to one call.
            return self._run_alone(runs, show_progress)

    def _run_alone(self, runs: list[_Run], show_progress: bool) -> list[RequestOutput]:
        core = self._engine()
        self._refuse_if_stepped()
        open_answers = {answer.request.request_id: (run, answer) for run in runs for answer in run.answers}
        with RequestProgress(len(runs), shown=show_progress) as progress:
            try:
                for _, answer in open_answers.values():
                    core.add(answer.request)
                while open_answers:
                    for output in core.step():
                        run, answer = open_answers[output.request_id]
                        if output.failure is not None:
                            run.fail(answer.index, output.failure.error(output.request_id))
                        else:
                            run.take(answer.take(output))
                        if answer.finished or output.failure is not None:
                            del open_answers[output.request_id]
                            if output.finish_reason is None:
                                core.abort(output.request_id)
                            progress.advance(tokens=len(answer.token_ids), finished=run.output.finished)
            except HoldfastError:
                for request_id in open_answers:
                    core.abort(request_id)
                raise
            except BaseException:  # Ctrl-C falls anywhere, also into the middle of the books: nothing of them is kept.
                core.start_over()
                raise
        return [run.output for run in runs]


class _Run:
    """One prompt's answers being put together."""

    def __init__(self, output: RequestOutput, answers: list[OutputBuilder]) -> None:
        self.output = output
        self.answers = answers
        self.embedding: bytes | None = None
        self._left = len(answers)
        output.outputs = [CompletionOutput(index=answer.index) for answer in answers]

    def take(self, delta: AnswerDelta) -> None:
        self.embedding = delta.embedding or self.embedding
        answer = self.output.outputs[delta.index]
        answer.text += delta.text
        answer.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + delta.logprobs
            chosen = sum(entry[token].logprob for token, entry in zip(delta.token_ids, delta.logprobs, strict=True))
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + chosen
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = self.output.prompt_logprobs or []
            self.output.prompt_logprobs.extend(delta.prompt_logprobs)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.cached_tokens)
        if delta.finish_reason is not None:
            self._end(answer, delta.finish_reason, delta.stop_reason)

    def fail(self, index: int, error: HoldfastError) -> None:
        """What is wrong with the request is raised; when there was no memory for it, or no numbers came of it, the
        others are not lost."""
        if not isinstance(error, StepMemoryError | NotFiniteError | GrammarError):
            raise error
        log.warning("prompt %s ends with finish_reason 'error': %s", self.output.request_id, error)
        self._end(self.output.outputs[index], FinishReason.ERROR, error.code)

    def _end(self, answer: CompletionOutput, reason: FinishReason, stop_reason: int | str | None) -> None:
        answer.finish_reason, answer.stop_reason = reason.value, stop_reason
        self._left -= 1
        self.output.finished = self._left == 0
