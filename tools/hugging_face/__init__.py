"""Converts models between the Hugging Face Hub's format and canonical checkpoints: settings, names and files.

tools/checkpoint.py is the command line.
"""
