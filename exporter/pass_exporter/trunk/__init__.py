"""Traces the trunk's graph, cleans it up and saves it."""
