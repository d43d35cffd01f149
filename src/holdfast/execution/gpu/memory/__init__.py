"""GPU memory: accounting, reserved ranges, staging, and running out."""
