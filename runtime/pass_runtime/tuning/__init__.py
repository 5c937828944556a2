"""The mode `auto`: measures pass times and acceptance, and chooses the fastest cycle of plans."""
