"""Chooses an engine or a server for each request. Independent of text, sockets and the clock."""
