"""How fast: pass times, the arithmetic of group sizes, and `--plan auto`."""
