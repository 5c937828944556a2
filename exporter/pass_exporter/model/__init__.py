"""The frozen model and its look-ahead weights: finding, loading and checking both. The trainer uses this too."""
