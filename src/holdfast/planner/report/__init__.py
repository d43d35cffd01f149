"""The answer as JSON, and as text."""
