"""A session as a model of Triton's Python backend: `model.Model`. Needs no package of the extra `serve`."""
