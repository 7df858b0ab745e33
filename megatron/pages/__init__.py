"""Builds HTML pages with plotly figures that open from disk without a network. Imports nothing else of this project."""
