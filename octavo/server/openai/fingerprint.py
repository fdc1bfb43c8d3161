"""The `system_fingerprint` of responses: equal for equal model, backend and version."""

from __future__ import annotations

import functools
from hashlib import blake2b

from octavo.config.config_hooks import get_result_options
from octavo.config.engine_config import EngineConfig
from octavo.utils.version import __version__


@functools.lru_cache(maxsize=64)
def make_fingerprint(config: EngineConfig) -> str:
    """Returns a digest of everything that affects an engine's numerical results."""
    deciding = (
        __version__,
        config.model,
        config.backend,
        config.cache.kv_cache_dtype,
        get_result_options(config),
        *((config.lora.lora_dtype,) if config.lora.enable_lora else ()),
    )
    return f"fp_{blake2b(repr(deciding).encode(), digest_size=6).hexdigest()}"
