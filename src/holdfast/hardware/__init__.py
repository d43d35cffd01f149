"""What the machine has."""

from holdfast.hardware.probe import Memory, Processor, memory, processor

__all__ = ["Memory", "Processor", "memory", "processor"]
