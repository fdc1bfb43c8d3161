"""Images in prompts: where their bytes come from, decoding within limits, and resizing for a model.

Decodes with Pillow, imported when the first image arrives.
"""
