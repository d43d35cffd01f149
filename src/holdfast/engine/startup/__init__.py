"""From settings to a running engine: device, plan, weights."""
