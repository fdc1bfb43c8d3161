"""The version of Octavo, importable from anywhere."""

__version__ = "0.1.0"
