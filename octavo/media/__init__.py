"""Images in prompts: fetching, decoding within limits, and resizing for a model.

Decodes with Pillow, which is imported when the first image arrives.
"""
