"""Settings of a server chosen by measurement: which combinations are worth a run, runs of them, and which to keep."""
