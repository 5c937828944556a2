"""A session as a model of Triton's Python backend: `model.Model` is all of it. Needs nothing of the extra `serve`."""
