"""How long tests wait for what must happen. No measure of speed: other work may have the machine."""

PATIENCE_S = 120.0
