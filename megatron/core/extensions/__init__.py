"""Layers of other packages with the interfaces of this project's layers; only spec builders import them."""
