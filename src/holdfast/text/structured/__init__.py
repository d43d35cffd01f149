"""Structured output: what an answer must look like, as a grammar; compiled and matched in processes of its own."""
