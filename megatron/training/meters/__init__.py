"""Meters: measurements requested by flags, taken on every rank and added to the report of a step."""
