"""`model.Model` for Triton's Python backend. It needs no package of the extra `serve`."""
