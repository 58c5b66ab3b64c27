"""Public name of the exchange: `seq_to_heads`, its inverse, `reshard` between any two dims, and the shift of a ring."""

from longspan.comm.all_to_all import heads_to_seq, reshard, seq_to_heads
from longspan.comm.p2p import ring_shift

__all__ = ["heads_to_seq", "reshard", "ring_shift", "seq_to_heads"]
