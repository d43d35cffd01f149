"""The methods of `LLM` that want vectors, classes or scores of prompts and no answers. Owns no state.

What a model can is told by its labels (`engine.requests.scoring`); what it cannot is refused by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast.config.python_words import tells_scripts
from holdfast.engine.requests.embedding import embedding_output, numbers, pooled, shortened
from holdfast.engine.requests.scoring import (
    chances,
    cosines,
    pairs,
    require_embeddings,
    require_labels,
    require_score,
)
from holdfast.errors import UnsupportedOptionError
from holdfast.records import EmbeddingRequestOutput, EngineInfo, RequestOutput
from holdfast.records.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from holdfast.text.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, {"prompt": text}, {"prompt_token_ids": [...]}, or token ids."""
_POOLED_BY_TOKEN = "only the last token is pooled"


class PoolingMethods:
    info: EngineInfo

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def _pool(
        self, prompts: Prompt | Sequence[Prompt], show_progress: bool
    ) -> list[tuple[RequestOutput, bytes | None]]: ...

    @property
    @abstractmethod
    def _embedding_size(self) -> int: ...

    @tells_scripts
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, in order: the normed hidden state of its last token, scaled to length 1."""
        require_embeddings(self.info, "embed")
        if pooling_params is not None:
            pooling_params.check(self._embedding_size)
        size = None if pooling_params is None else pooling_params.dimensions
        return [
            embedding_output(output, shortened(vector, size) if size and vector else vector)
            for output, vector in self._pool(prompts, use_tqdm)
        ]

    @tells_scripts
    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, pooling_params: Any = None
    ) -> list[ClassificationRequestOutput]:
        """The chances of the model's labels, a list a prompt, in order."""
        _no_pooling_params(pooling_params)
        require_labels(self.info, "classify")
        return [
            ClassificationRequestOutput(
                request_id=output.request_id,
                outputs=ClassificationOutput(probs=self._chances(output, vector)),
                prompt_token_ids=output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output, vector in self._pool(prompts, use_tqdm)
        ]

    @tells_scripts
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: Literal["embed", "classify"] | str | None = None,
        use_tqdm: bool = True,
        pooling_params: Any = None,
    ) -> list[PoolingRequestOutput]:
        """Embeddings or chances, as tensors; `pooling_task`: left out, which of them the model has."""
        _no_pooling_params(pooling_params)
        task = pooling_task or ("classify" if self.info.labels else "embed")
        if task not in ("embed", "classify"):
            raise UnsupportedOptionError(
                f"pooling_task={task!r} is not supported: {_POOLED_BY_TOKEN}",
                needed="embed or classify",
                fix='encode(prompts, pooling_task="embed")',
                field="pooling_task",
            )
        (require_embeddings if task == "embed" else require_labels)(self.info, f"pooling_task={task!r}")
        from holdfast.execution.layers.pooling import as_tensor

        return [
            PoolingRequestOutput(
                request_id=output.request_id,
                outputs=PoolingOutput(data=as_tensor(self._chances(output, vector))),
                prompt_token_ids=output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output, vector in self._pool(prompts, use_tqdm)
        ]

    @tells_scripts
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: Any = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` fits the one of `data_1`, or its own: by cosine of their embeddings, or by a
        classifier that reads both. `chat_template`: joins them, from the roles query and document."""
        _no_pooling_params(pooling_params)
        require_score(
            self.info, "score", f'LLM(model="{self.info.model}", runner="pooling"), or use an embedding model'
        )
        first, second = ([given] if isinstance(given, str) else list(given) for given in (data_1, data_2))
        joined = pairs(first, second, ("data_1", "data_2"))
        if not self.info.labels:
            return self._compared(joined, use_tqdm)
        tokenizer = self.get_tokenizer()
        prompts = [tokenizer.encode_pair(one, other, chat_template) for one, other in joined]
        return [
            ScoringRequestOutput(
                request_id=output.request_id,
                outputs=ScoringOutput(score=self._chances(output, vector)[0]),
                prompt_token_ids=output.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
            )
            for output, vector in self._pool(prompts, use_tqdm)
        ]

    def _compared(self, joined: list[tuple[str, str]], show_progress: bool) -> list[ScoringRequestOutput]:
        texts = list(dict.fromkeys(text for pair in joined for text in pair))
        known = dict(zip(texts, self._pool(texts, show_progress), strict=True))
        places = {text: place for place, text in enumerate(texts)}
        scores = cosines(
            [pooled(*known[text]) for text in texts], [(places[one], places[other]) for one, other in joined]
        )
        found = []
        for (one, other), score in zip(joined, scores, strict=True):
            outputs = [known[text][0] for text in (one, other)]
            found.append(
                ScoringRequestOutput(
                    request_id=outputs[1].request_id,
                    outputs=ScoringOutput(score=score),
                    prompt_token_ids=[*outputs[0].prompt_token_ids, *outputs[1].prompt_token_ids],
                    num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
                )
            )
        return found

    def _chances(self, output: RequestOutput, vector: bytes | None) -> list[float]:
        """Of a model without labels: its vector."""
        return chances(numbers(pooled(output, vector)), self.info.label_activation)


def _no_pooling_params(given: Any) -> None:
    if given is not None:
        raise UnsupportedOptionError(
            f"pooling_params is not supported: {_POOLED_BY_TOKEN}",
            fix="leave pooling_params out",
            field="pooling_params",
        )
