"""Chooses which of several engines computes a request: one owner of the policies, for engines of
one process and for servers behind a router.

`job.py` says what is known of a request, `target.py` what is known of each engine, `policies.py`
chooses, `router.py` keeps the books. Knows no text, no socket and no clock.
"""
