"""Converts models of the Hugging Face hub to canonical checkpoints and back: settings, names and files.

tools/checkpoint.py is the command line.
"""
