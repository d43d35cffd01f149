"""`LLM.beam_search`: all beams of all prompts one token further at a time. The rules: `engine.requests.beam_search`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from holdfast.config.python_words import tells_scripts
from holdfast.engine.offline.pooling import Prompt
from holdfast.engine.requests.beam_search import BeamSearch, one_token
from holdfast.records import EngineInfo, LoRARequest, RequestOutput, SamplingParams
from holdfast.records.beams import BeamSearchOutput, BeamSearchParams
from holdfast.text.tokenizer.tokenizer import Tokenizer


class BeamMethods:
    info: EngineInfo

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def _prompt_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]: ...

    @abstractmethod
    def _continue(
        self, prompts: list[list[int]], params: SamplingParams, lora_request: LoRARequest | None, show_progress: bool
    ) -> list[RequestOutput]: ...

    @tells_scripts
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt, the best first; their tokens begin with the
        prompt's, as in vLLM."""
        asked = one_token(params)
        given = self._prompt_ids(prompts)
        searches = [BeamSearch(len(ids), params, self.info.eos_token_ids) for ids in given]
        for _ in range(params.max_tokens):
            # A prompt whose beams have reached the end of the context goes no further.
            going = [
                (ids, search)
                for ids, search in zip(given, searches, strict=True)
                if search.beams and len(ids) + len(search.beams[0].tokens) < self.info.max_model_len
            ]
            if not going:
                break
            longer = [[*ids, *beam.tokens] for ids, search in going for beam in search.beams]
            outputs = iter(self._continue(longer, asked, lora_request, use_tqdm))
            for _, search in going:
                search.expand([(next(outputs).outputs[0].logprobs or [{}])[0] for _ in search.beams])
        return [self._output(ids, search) for ids, search in zip(given, searches, strict=True)]

    def _output(self, prompt: list[int], search: BeamSearch) -> BeamSearchOutput:
        sequences = search.best()
        for beam in sequences:
            ended = bool(beam.tokens) and beam.tokens[-1] in search.ends and not search.params.ignore_eos
            beam.tokens = [*prompt, *beam.tokens]
            beam.text = self.get_tokenizer().decode(beam.tokens[:-1] if ended else beam.tokens)
        return BeamSearchOutput(sequences=sequences)
