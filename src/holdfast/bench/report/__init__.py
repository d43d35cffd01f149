"""What was measured, for people and for programs."""
