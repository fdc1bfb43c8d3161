"""Sound for models that hear: WAV files, resampling and log-mel features, in NumPy alone."""
