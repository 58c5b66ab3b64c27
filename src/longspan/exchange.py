"""Public all-to-alls: `seq_to_heads`, its inverse `heads_to_seq`, and `reshard` between any two dimensions."""

from longspan.comm.collectives import ring_shift
from longspan.comm.reshard import heads_to_seq, reshard, seq_to_heads, shard

__all__ = ["heads_to_seq", "reshard", "ring_shift", "seq_to_heads", "shard"]
