"""Models of Hugging Face's hub as canonical checkpoints and back: settings, names, files; the command line is
tools/checkpoint.py.
"""
