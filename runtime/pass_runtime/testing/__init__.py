"""For tests and checks: is it the same text, and a trunk that recites."""
