"""Trains small runs with two versions of this project and compares every number. Run by same_losses.py."""
