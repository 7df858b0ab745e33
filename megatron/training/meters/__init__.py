"""Meters: measurements on every rank that flags add to the report of a step."""
