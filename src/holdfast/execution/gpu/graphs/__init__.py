"""Decode steps as captured graphs: capture, when there are any where layers may leave, and what they may take."""
