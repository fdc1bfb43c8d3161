"""Builds an engine from its parts: checkpoint, Programs, backend, worker, scheduler, clients,
tokenizer.

`octavo/wiring/engine.py` is the entry point. The frozen config decides everything; extensions add
their parts through hooks.
"""
