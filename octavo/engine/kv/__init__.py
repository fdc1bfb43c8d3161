"""KV memory as the control plane sees it: block ids, counts and names, no byte.

Read `block_manager.py` first: what the scheduler asks for. Below it stand `block_pool.py` (the
blocks of one cache group), `block_tables.py` (which request holds which), `block_names.py` and
`hashed_blocks.py` (what a full block is called, and who learns of it), `prefix_cache.py` and
`prefix_finder.py` (what is computed already), `swapping.py` (blocks of swapped requests in host
memory), `prefix_loader.py`, `block_choice.py`, `kv_connector.py` and `tier_slots.py` (blocks
in host memory and on disk, found by name), `pin.py` (prefixes that are to stay there). How long
blocks of a group live is `octavo/engine/protocol/kv_cache_spec.py`.
"""
