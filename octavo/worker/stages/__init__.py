"""Pipeline parallelism: stages of a model in several processes."""
