"""vLLM's `LLM.enqueue` and `wait_for_completion`: requests that are taken now and computed later, all together.

Owns the ids it gave out. Steps are `stepped`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.engine.offline.stepped import SteppedEngine
from holdfast.records import LoRARequest, RequestOutput, SamplingParams
from holdfast.records.beams import RequestOutputKind

PREFIX = "queued-"
"""Of ids, so that none is one that a caller of `llm_engine` has made up."""


class QueuedMethods:
    _names: Iterator[int]

    @property
    @abstractmethod
    def llm_engine(self) -> SteppedEngine: ...

    @abstractmethod
    def _asked(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[Any], list[SamplingParams]]: ...

    @abstractmethod
    def _chat_prompts(self, messages: Sequence[Any], template: Mapping[str, Any]) -> list[Any]: ...

    @abstractmethod
    def _check_priority(self, priority: Sequence[int] | None, prompts: int) -> None: ...

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[str]:
        """The ids of the requests, in the order of their prompts. Where one cannot be taken, none is."""
        listed, chosen = self._asked(prompts, sampling_params)
        self._check_priority(priority, len(listed))
        adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(listed)
        names: list[str] = []
        try:
            for place, (prompt, params) in enumerate(zip(listed, chosen, strict=True)):
                name, params = f"{PREFIX}{next(self._names)}", params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                self.llm_engine.add_request(
                    name,
                    prompt,
                    params,
                    lora_request=adapters[place],
                    priority=0 if priority is None else priority[place],
                )
                names.append(name)
        except BaseException:
            self.llm_engine.abort_request(names)
            raise
        return names

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The same of conversations."""
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self.enqueue(self._chat_prompts(messages, template), sampling_params, lora_request, priority)

    def wait_for_completion(self, output_type: object = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Steps all that is queued to its end; in the order in which it was queued."""
        done: list[RequestOutput] = []
        while self.llm_engine.has_unfinished_requests():
            done += [output for output in self.llm_engine.step() if output.finished]
        return sorted(done, key=_place)


def _place(output: RequestOutput) -> tuple[int, str]:
    number = output.request_id.removeprefix(PREFIX)
    return (int(number), "") if number.isdigit() else (-1, number)
