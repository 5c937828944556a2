"""The tail graphs, by either rule of acceptance."""
