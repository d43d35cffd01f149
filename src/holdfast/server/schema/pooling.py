"""The bodies of endpoints that want vectors, classes or scores: vLLM's shapes. Meaning is given where they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from holdfast.server.schema.requests import PROMPT_SCHEMA, RequestId, Small, Usage

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class PoolingCommon(msgspec.Struct, kw_only=True):
    """What all of them take."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Small = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
    request_id: RequestId | None = None
    """vLLM's; ids of these responses are made here. X-Request-Id is repeated, and logged."""


class EmbeddingBody(PoolingCommon, kw_only=True):
    """In place of `input`, `messages` and what else makes a chat's prompt may stand."""

    input: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)]
    """A text, several, token ids, or several lists of them."""
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    """`bytes`: the body is the numbers themselves, and the header `metadata` says where each vector lies; `bytes_only`:
    without that header. Both as vLLM has them."""
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of numbers in base64, as vLLM has it; those in JSON are float32."""
    endianness: Literal["native", "little", "big"] = "native"
    """Of them too; native is the server's."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """The first so many numbers of a vector, at length 1 again."""
    add_special_tokens: bool = True
    use_activation: bool | None = None
    """False: a classifier's products as they are. Embeddings are at length 1 in any case, and it is refused."""
    normalize: bool | None = None
    """The same by its older name."""


class PoolingBody(EmbeddingBody, kw_only=True):
    """Of /pooling."""

    task: str | None = None
    """embed or classify; left out: which of them the model can."""


class ClassifyBody(PoolingCommon, kw_only=True):
    input: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)]
    add_special_tokens: bool = True
    use_activation: bool | None = None


class ScoringCommon(PoolingCommon, kw_only=True):
    use_activation: bool | None = None
    max_tokens_per_query: Count = 0
    """0: as many as there are."""
    max_tokens_per_doc: Count = 0
    instruction: str | None = None
    """A variable of the template that joins two texts."""
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreBody(ScoringCommon, kw_only=True):
    """Two sides under one of four pairs of names."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None


class RerankBody(ScoringCommon, kw_only=True):
    query: Any
    documents: Any
    top_n: Count = 0
    """Of the best; 0: all."""
    return_documents: bool = True
    """Cohere's and Jina's: whether results repeat the texts."""


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str
    """Numbers, or those of `embed_dtype` in the order of `endianness` as base64."""


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledData(msgspec.Struct, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: Usage


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classified]
    usage: Usage


class Scored(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Scored]
    usage: Usage


class RerankedText(msgspec.Struct, kw_only=True):
    text: str
    multi_modal: None = None


class Reranked(msgspec.Struct, kw_only=True):
    index: int
    document: RerankedText | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: RerankUsage
    results: list[Reranked]
