"""Exports a frozen Hugging Face decoder to a PaSS bundle. The runtime does not import this package,
which needs torch."""
