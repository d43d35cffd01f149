"""The work of `holdfast run-batch`."""
