"""Finds, loads and checks the frozen model and its look-ahead weights."""
