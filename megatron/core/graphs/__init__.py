"""CUDA graphs: interfaces of a capture, its emulation on the CPU, and the linter for captured code."""
