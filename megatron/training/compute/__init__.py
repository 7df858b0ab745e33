"""Counts the floating-point operations of a model, and provides the figures of the devices that execute them."""
