"""Checks of an export: the exporter runs them on the bundle that it has just written."""
