"""Counts the floating-point operations of a model, and describes the devices that execute them."""
