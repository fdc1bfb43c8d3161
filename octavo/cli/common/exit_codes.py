"""Exit codes of the `octavo` command."""

ENGINES_FAULT = 1
CALLERS_FAULT = 2
"""An invalid option, file or request."""

INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT."""

OUTPUT_CLOSED = 141
"""A write to a closed pipe: 128 + SIGPIPE."""
