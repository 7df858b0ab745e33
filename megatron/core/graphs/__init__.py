"""CUDA graphs: interfaces of a capture, its stand-in on the CPU, and the lint for captured code."""
