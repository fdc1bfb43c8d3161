"""The sections of benchmarks/gpu.py, each a function that runs in a process of its own."""
