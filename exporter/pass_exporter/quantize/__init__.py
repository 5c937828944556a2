"""Quantizes a model's weights, and rewrites the trunk to read the codes."""
