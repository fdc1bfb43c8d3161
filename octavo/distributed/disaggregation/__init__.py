"""Prefill/decode disaggregation: the frontend half."""
