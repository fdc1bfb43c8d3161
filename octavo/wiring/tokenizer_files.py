"""Locates a model's tokenizer."""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.ports import Checkpoint, TokenizerSource
from octavo.config.model_options import ModelOptions
from octavo.config.paths import expand_path, path_exists


def find_tokenizer(options: ModelOptions, checkpoint: Checkpoint) -> TokenizerSource:
    """Returns the model's own tokenizer, or the one named by the option `tokenizer`: a directory or
    a model with a tokenizer.
    """
    name = options.tokenizer
    if name is None:
        source, where = checkpoint.tokenizer_source(), str(checkpoint.path)
    elif not path_exists(path := expand_path(name)):
        raise ConfigError(
            f"tokenizer: got {name!r}, no such file or directory",
            hint="give a directory with tokenizer.json, or omit tokenizer to use the model's own",
        )
    elif path.is_dir():
        source = tokenizer_source(path, checkpoint.config, checkpoint.generation_config)
        where = name
    else:
        source, where = open_checkpoint(path).tokenizer_source(), name
    if source is None:
        raise ConfigError(
            f"{where}: has no tokenizer",
            hint="set `tokenizer`, or pass token ids with skip_tokenizer_init",
        )
    return source
