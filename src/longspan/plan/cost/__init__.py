"""Totals of one job on one mesh: bytes sent, memory, seconds. They ask each layer's mixing and MLP for its part."""
