"""CUDA graphs: what captures work and who takes part, a stand-in on the CPU, and the lint for captured code."""
