"""Exports a frozen Hugging Face decoder to a PaSS bundle. It needs torch; the runtime does not
import this package."""
