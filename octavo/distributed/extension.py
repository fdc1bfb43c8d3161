"""What this package adds to octavo: options, commands and hooks. Nothing outside names it."""

from octavo.utils.extensions import Extension

EXTENSION = Extension(
    commands={
        "route": "octavo.distributed.cli.route",
        "cluster": "octavo.distributed.cli.cluster",
    },
)
