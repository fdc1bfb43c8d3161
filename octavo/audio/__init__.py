"""Audio input: decoding with soundfile and soxr, log-mel features in NumPy."""
