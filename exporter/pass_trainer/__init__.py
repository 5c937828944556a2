"""OFFLINE: train the look-ahead embeddings, and adapters for look-ahead rows, of a frozen model."""
