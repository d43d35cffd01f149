"""What a layer asks of other ranks beside its sums, so that all compute as one rank would: which experts are chosen, by
what inputs are rounded, and norms over all heads."""
