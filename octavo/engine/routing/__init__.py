"""Chooses an engine or a server for each request. Knows no text, no socket and no clock."""
