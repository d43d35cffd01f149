"""An `LLM` that its caller steps, as scripts for vLLM do. Requests come in while others run.

Owns the open requests by the caller's ids, and what each step says of them. The loop, the model and the checks are
`LLM`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.engine.requests.whole_vocabulary import is_whole
from holdfast.errors import HoldfastError, RequestError, UnsupportedOptionError
from holdfast.records import AdapterRef, CompletionOutput, LoRARequest, RequestOutput, SamplingParams
from holdfast.records.beams import RequestOutputKind

if TYPE_CHECKING:
    from holdfast.engine.core.loop import EngineCore
    from holdfast.engine.requests.output import OutputBuilder
    from holdfast.text.tokenizer.tokenizer import Tokenizer


class SteppedEngine:
    def __init__(self, llm: Any) -> None:
        """`llm`: an `LLM`, whose module imports this one."""
        self._llm = llm
        self._runs: dict[str, _Open] = {}
        self._of: dict[str, tuple[_Open, OutputBuilder]] = {}
        """By the engine's own name of each answer."""

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
        adapter: AdapterRef | None = None,
    ) -> None:
        """Raises for a prompt that cannot be taken; nothing is computed yet. `adapter`: what `find_adapter` said of
        `lora_request`, where it was asked before."""
        if not isinstance(params, SamplingParams):
            raise UnsupportedOptionError(
                f"{type(params).__name__} is not supported here: an engine generates", fix="LLM.embed", field="params"
            )
        if is_whole(params):
            raise UnsupportedOptionError(
                "prompt_logprobs=-1 is not supported here: a step has room for one such prompt",
                fix="LLM.generate",
                field="prompt_logprobs",
            )
        if request_id in self._runs:
            raise RequestError(f"there is already a request {request_id}", field="request_id")
        self._llm._check_priority([priority], 1)
        if adapter is None:
            [adapter] = self._llm._adapters.one_each(lora_request, 1)
        run = self._llm._prepare(prompt, params, priority, adapter=adapter)
        run.output.request_id, run.output.lora_request = request_id, lora_request
        opened = _Open(run, params.output_kind)
        with self._llm._turn:
            core: EngineCore = self._llm._engine()
            self._runs[request_id] = opened
            try:
                for answer in run.answers:
                    self._of[answer.request.request_id] = opened, answer
                    core.add(answer.request)
            except BaseException:
                self._abort(core, [request_id])
                raise

    def find_adapter(self, lora_request: LoRARequest) -> AdapterRef:
        """Looks at its files, which may take long. May be called by any thread, also while another steps."""
        found: AdapterRef = self._llm._adapters.resolve(lora_request)
        return found

    def step(self) -> list[RequestOutput]:
        """One step of all requests; what it says of each, as its `output_kind` asks."""
        if not self._runs:
            return []
        changed: dict[str, _Open] = {}
        with self._llm._turn:
            core = self._llm._engine()
            try:
                for output in core.step():
                    opened, answer = self._of[output.request_id]
                    changed[opened.run.output.request_id] = opened
                    if output.failure is not None:
                        opened.run.fail(answer.index, output.failure.error(output.request_id))
                    else:
                        opened.run.take(answer.take(output))
                    if answer.finished or output.failure is not None:
                        del self._of[output.request_id]
                        if output.finish_reason is None:
                            core.abort(output.request_id)
            except HoldfastError:
                self._abort(core, list(self._runs))
                raise
            except BaseException:  # As in `LLM`: Ctrl-C falls anywhere, and nothing of the books is kept.
                core.start_over()
                self._runs.clear()
                self._of.clear()
                raise
        told = [one for one in (opened.told() for opened in changed.values()) if one is not None]
        for name, opened in changed.items():
            if opened.run.output.finished:
                del self._runs[name]
        return told

    def has_unfinished_requests(self) -> bool:
        return bool(self._runs)

    def get_num_unfinished_requests(self) -> int:
        return len(self._runs)

    def abort_request(self, request_id: str | Iterable[str], *_: Any) -> None:
        with self._llm._turn:
            self._abort(self._llm._engine(), [request_id] if isinstance(request_id, str) else list(request_id))

    def _abort(self, core: EngineCore, names: list[str]) -> None:
        for name in names:
            opened = self._runs.pop(name, None)
            for answer in () if opened is None else opened.run.answers:
                if self._of.pop(answer.request.request_id, None) is not None:
                    core.abort(answer.request.request_id)

    def get_tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self._llm.get_tokenizer()
        return tokenizer

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Requests that run keep their blocks, also where vLLM would recompute them: weights never change here."""
        self._llm.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        self._llm.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._llm.wake_up(tags)

    def is_sleeping(self) -> bool:
        return bool(self._llm.is_sleeping())

    def shutdown(self) -> None:
        self._llm.close()


class _Open:
    """One request, and how much of it was told."""

    def __init__(self, run: Any, kind: RequestOutputKind) -> None:
        self.run = run
        self._kind = kind
        self._told = [(0, 0, 0)] * len(run.answers)

    def told(self) -> RequestOutput | None:
        whole: RequestOutput = self.run.output
        if self._kind is RequestOutputKind.FINAL_ONLY and not whole.finished:
            return None
        shown = [self._copy(answer) for answer in whole.outputs]
        return replace(whole, outputs=shown)

    def _copy(self, answer: CompletionOutput) -> CompletionOutput:
        """What is told must not grow any more."""
        chars, tokens, entries = self._told[answer.index] if self._kind is RequestOutputKind.DELTA else (0, 0, 0)
        logprobs = None if answer.logprobs is None else answer.logprobs[entries:]
        self._told[answer.index] = (len(answer.text), len(answer.token_ids), len(answer.logprobs or ()))
        return replace(answer, text=answer.text[chars:], token_ids=answer.token_ids[tokens:], logprobs=logprobs)
