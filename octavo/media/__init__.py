"""Images as users give them, and as a model reads them: where their bytes come from, how they are
decoded within limits, and the size that each model wants.

Decodes with Pillow, which is imported when the first image comes.
"""
