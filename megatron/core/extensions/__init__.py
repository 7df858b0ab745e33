"""Layers of other packages under the interfaces of this project's own layers; only builders of specs import them."""
