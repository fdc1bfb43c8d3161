"""The sections of benchmarks/gpu.py, each a function of a process of its own."""
