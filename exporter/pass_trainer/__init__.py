"""Trains look-ahead embeddings, adapters and draft heads for a frozen model."""
