"""What engines on several machines say to each other about KV blocks: addresses, locks, messages.

Knows no engine: `worker/kv_connectors/transfer.py` moves the blocks, `frontend/remote_prefill.py`
and `prefill_service.py` ask for them and have them computed.
"""
