"""Paged stashing: the live rows of what expert backward needs, in pages; knows torch and Triton alone."""
