"""Where vLLM keeps these names, for code that imports them from there. Owns nothing."""

from holdfast.records import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "Logprob", "RequestOutput"]
