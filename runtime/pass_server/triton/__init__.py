"""A model for Triton's Python backend, `model.Model`. It needs no package of the extra `serve`."""
