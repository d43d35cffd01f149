"""Reads a failed or struggling server, ours or another engine's, and says what happened and what helps."""

from holdfast.doctor.logs import Watch, diagnose, diagnose_lines

__all__ = ["Watch", "diagnose", "diagnose_lines"]
