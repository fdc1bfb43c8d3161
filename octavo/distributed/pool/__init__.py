"""A store of KV blocks shared by engines, in Mooncake."""
