"""How weights are quantized, as checkpoints' configs say it. Not how bytes lie on disk or in memory."""

from holdfast.models.quantization.methods import quantization_from_config
from holdfast.models.quantization.spec import INSTEAD, QuantSpec

__all__ = ["INSTEAD", "QuantSpec", "quantization_from_config"]
