"""Layers that can be split over the tensor-parallel group; a group of one for now."""
