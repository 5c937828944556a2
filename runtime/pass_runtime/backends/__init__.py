"""Engines that run the graphs of a bundle."""
