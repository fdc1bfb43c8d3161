"""The one place that builds an engine out of its parts: checkpoint, Programs, backend, worker,
scheduler, clients, tokenizer.

Everything is chosen by the frozen config; nothing is registered or looked up elsewhere.
`octavo/wiring/engine.py` is where it comes together, from the model, its ranks and the tiers of its
prefix cache.
"""
