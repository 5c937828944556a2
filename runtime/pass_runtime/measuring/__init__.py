"""What benches, exports and training share: texts that are equal or not, loops, tokens per pass, taking turns."""
