"""Models made of the transformer's parts."""
