"""Fixtures of the doctor's tests."""

from __future__ import annotations

import pytest

from holdfast.doctor.diagnosis import confidence


@pytest.fixture
def every_rule_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the other grounds of high: a rule's record changes with each set of logs that is read."""
    monkeypatch.setattr(confidence, "proven", lambda _rule: True)
