"""Calls of functions, in the formats in which models write them."""
