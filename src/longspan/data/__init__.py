"""Elastic batches."""
