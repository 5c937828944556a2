"""What benchmarks, exports and training share: comparing texts, counting and timing passes."""
