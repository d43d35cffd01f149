"""What a model is. One file a family maps a config.json or a GGUF header to a ModelSpec."""

from holdfast.models.registry import FAMILIES, from_config, from_gguf, known_architectures, known_gguf_architectures
from holdfast.models.spec import LayerSpec, ModelSpec, RopeSpec, TensorSpec

__all__ = [
    "FAMILIES",
    "LayerSpec",
    "ModelSpec",
    "RopeSpec",
    "TensorSpec",
    "from_config",
    "from_gguf",
    "known_architectures",
    "known_gguf_architectures",
]
