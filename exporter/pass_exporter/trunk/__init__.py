"""The trunk graph: tracing, tidying, quantizing, saving."""
