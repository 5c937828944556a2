"""The exporter's own checks of what it wrote."""
