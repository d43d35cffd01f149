"""What a model is. One file a family maps a config.json or a GGUF header to a ModelSpec."""

from holdfast.models.quantization import QuantSpec
from holdfast.models.registry import (
    FAMILIES,
    describe_config,
    describe_gguf,
    from_config,
    from_gguf,
    known_architectures,
    known_gguf_architectures,
    runnable_architectures,
    runnable_gguf_architectures,
)
from holdfast.models.runnable import text_alone
from holdfast.models.spec import (
    DecoderSpec,
    EncoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    StateSpec,
    TensorSpec,
)

__all__ = [
    "FAMILIES",
    "DecoderSpec",
    "EncoderSpec",
    "ExpertsSpec",
    "LatentSpec",
    "LayerSpec",
    "ModelSpec",
    "QuantSpec",
    "RopeSpec",
    "StateSpec",
    "TensorSpec",
    "describe_config",
    "describe_gguf",
    "from_config",
    "from_gguf",
    "known_architectures",
    "known_gguf_architectures",
    "runnable_architectures",
    "runnable_gguf_architectures",
    "text_alone",
]
