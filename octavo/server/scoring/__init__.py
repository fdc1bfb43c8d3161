"""Routes that classify texts, score pairs of them and put documents in order."""
