"""Registers the options, commands and hooks of this package. No module outside the package refers
to them.
"""

from octavo.utils.extensions import Extension

EXTENSION = Extension(
    options=(
        "octavo.distributed.options:PoolOptions",
        "octavo.distributed.options:TransferOptions",
    ),
    commands={
        "Serve models": {
            "route": "octavo.distributed.cli.route",
            "cluster": "octavo.distributed.cli.cluster",
        }
    },
    hooks={
        "config": "octavo.distributed.config_hooks:DistributedConfigHooks",
        "model": "octavo.distributed.model_hooks:DistributedModelHooks",
        "remote_prefill": "octavo.distributed.disaggregation.transfers:Transfers",
        "doctor": "octavo.distributed.cli.doctor:distributed_findings",
    },
)
