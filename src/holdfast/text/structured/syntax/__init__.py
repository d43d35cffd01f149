"""Grammars as clients write them, read in linear time."""
