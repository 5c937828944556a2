"""The frozen model, its look-ahead weights, and where both come from; shared with the trainer."""
