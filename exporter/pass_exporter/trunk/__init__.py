"""The trunk graph: tracing, tidying, spare query rows, saving."""
