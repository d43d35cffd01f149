"""Token ids of an answer turned into text, and what in it ends or structures it."""
