"""Models built from the transformer's parts."""
