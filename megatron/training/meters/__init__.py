"""Meters: measurements that flags request, taken on every rank and added to the report of a step."""
