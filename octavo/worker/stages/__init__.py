"""The stages of a model whose layers several processes share out, one behind another."""
