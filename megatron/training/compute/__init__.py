"""The arithmetic of a model, and the devices that do it."""
