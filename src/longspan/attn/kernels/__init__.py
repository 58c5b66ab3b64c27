"""Attention of some queries to some keys on one device: each kernel gives the output and its log-sum-exp."""
