"""The version of Octavo: a leaf, so that any part may name it."""

__version__ = "0.1.0"
