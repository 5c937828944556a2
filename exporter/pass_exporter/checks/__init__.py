"""Checks of the bundle that an export has just written."""
