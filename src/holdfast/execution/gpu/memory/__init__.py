"""GPU memory: accounting, shares of the budget, reserved ranges, staging, and running out."""
