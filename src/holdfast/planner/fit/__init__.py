"""Whether a model fits on devices, and with which limits."""
