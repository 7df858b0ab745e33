"""Floating-point operations of a model, and figures of the devices that execute them."""
