"""Decoding: sequences, the slots in which they decode, and the choice of the next pass."""
