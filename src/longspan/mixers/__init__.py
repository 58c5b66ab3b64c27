"""Recurrent mixers on a sharded sequence: fragments, state passing, linear attention, short convolutions."""
