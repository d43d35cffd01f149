"""The endpoints beside generation."""
