"""Derives Programs from transformers' modelling code, for model types without a family module."""
