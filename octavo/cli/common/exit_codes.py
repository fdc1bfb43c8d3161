"""Exit codes of the `octavo` command, as shells have them."""

ENGINES_FAULT = 1
CALLERS_FAULT = 2
"""Exit code after a wrong option, file or request."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""

OUTPUT_CLOSED = 141
"""Exit code after a write to a pipe without a reader: 128 + SIGPIPE."""
