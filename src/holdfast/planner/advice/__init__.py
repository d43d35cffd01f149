"""What helps where it does not fit, and what it costs."""
