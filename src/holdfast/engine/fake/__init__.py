"""An engine without a model that says what a script tells it to: for tests of clients and of our own server."""

from holdfast.engine.fake.engine import FakeEngine
from holdfast.engine.fake.script import Script, echo, say

__all__ = ["FakeEngine", "Script", "echo", "say"]
