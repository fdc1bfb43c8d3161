"""Instances on several machines: what a plan asks for, and what keeps it so. Ray places, watches
and restarts; no token goes through it.
"""
