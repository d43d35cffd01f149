"""Logs turned into lines, whatever they come wrapped in."""
