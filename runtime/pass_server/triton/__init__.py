"""A `pass_runtime.Session` as `model.Model`, for Triton's Python backend. Needs no package of the
extra `serve`."""
