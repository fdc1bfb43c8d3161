"""Sound for models that hear: decoding with soundfile and soxr, log-mel features in NumPy."""
