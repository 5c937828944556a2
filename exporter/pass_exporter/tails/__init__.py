"""Builds the tails: the graphs that sample, accept drafts and lay out the next window."""
