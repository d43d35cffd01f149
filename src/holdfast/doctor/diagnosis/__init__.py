"""From evidence to a cause and a fix."""
