"""Diagnoses a failed or slow server, ours or another engine's, and suggests a fix."""

from holdfast.doctor.diagnosis.diagnose import LiveDiagnosis, diagnose, diagnose_lines

__all__ = ["LiveDiagnosis", "diagnose", "diagnose_lines"]
