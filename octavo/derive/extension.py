"""Registers the command and the hook of this package. No code outside this package refers to it."""

from octavo.utils.extensions import Extension

EXTENSION = Extension(
    commands={"Manage models": {"derive": "octavo.derive.command"}},
    hooks={"model": "octavo.derive.model_hooks:DeriveHooks"},
)
