"""Traces the trunk graph, cleans it up, adds spare query rows and saves it."""
