"""What benches, exports and training compare texts by: equal or not, loops, tokens per pass by kind of prompt."""
