"""Sequences, the slots they decode in, and which pass comes next."""
