"""HTML pages with plotly figures, which open from disk without a network. Imports nothing else of this project."""
