"""Reads a failed or struggling server, ours or another engine's, and says what happened and what helps."""

from holdfast.doctor.diagnosis.diagnose import LiveDiagnosis, diagnose, diagnose_lines

__all__ = ["LiveDiagnosis", "diagnose", "diagnose_lines"]
