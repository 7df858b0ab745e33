"""Meters: measurements that flags request, made on every rank and added to the report of a step."""
