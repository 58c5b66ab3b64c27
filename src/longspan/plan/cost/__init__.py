"""Totals of one job on one mesh: bytes sent, memory, seconds. They ask each layer's mixer and MLP for its part."""
