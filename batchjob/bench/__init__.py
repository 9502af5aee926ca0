"""Measurements that people can repeat: this machine's own limits, and the engine against them on a workload."""
