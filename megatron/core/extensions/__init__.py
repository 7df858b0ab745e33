"""Layers of other packages under the interfaces of this project's own; builders of specs alone import them."""
