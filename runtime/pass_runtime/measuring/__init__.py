"""What benches, exports and training share: comparing texts, counting passes, timing in turns."""
