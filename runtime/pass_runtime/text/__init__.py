"""Tokens to text, and conversations to tokens."""
