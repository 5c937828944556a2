"""Builds the tail graphs, for both acceptance rules: exact match and rejection."""
