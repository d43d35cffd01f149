"""The parts of a decoder layer on a GPU."""
