"""The gate: trains small runs with two versions of this project and compares every number; run by same_losses.py."""
