"""Measurements that flags add to the report of a step; each runs on every rank."""
