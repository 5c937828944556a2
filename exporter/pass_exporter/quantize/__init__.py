"""Numbers of fewer bits: which (spec), how weights become them (grid, weights), and the graph over them (rewrite)."""
