"""Attention of some queries to some keys on one device: each kernel returns the output, most with its log-sum-exp."""
