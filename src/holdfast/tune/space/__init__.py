"""What there is to choose from: settings and their values, plans of every combination, and which are worth a run."""
