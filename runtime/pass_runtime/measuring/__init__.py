"""What benches, exports and training share: comparing texts, finding loops, counting passes, timing
in turns."""
