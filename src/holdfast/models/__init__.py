"""What a model is. One file a family maps a config.json or a GGUF header to a ModelSpec."""

from holdfast.models.spec import LayerSpec, ModelSpec, RopeSpec, TensorSpec

__all__ = ["LayerSpec", "ModelSpec", "RopeSpec", "TensorSpec"]
