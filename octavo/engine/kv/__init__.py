"""KV memory in the control plane: block ids, reference counts and hashes, no bytes.

Read `block_manager.py` first, the interface for the scheduler. Below it are `block_pool.py` (blocks
and prefix cache of one cache group), `block_tables.py` (blocks of each request), `hashed_blocks.py`
(block hashes, prefix cache hits), `swapping.py` (blocks of swapped requests in host memory), and
for blocks outside the device `kv_connector.py`, `tier_slots.py`, `prefix_loader.py` and
`block_choice.py`. The rules of a cache group are in `octavo/engine/protocol/kv_cache_spec.py`.
"""
