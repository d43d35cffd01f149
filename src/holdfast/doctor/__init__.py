"""Reads a failed or struggling server, ours or another engine's, and says what happened and what helps."""
