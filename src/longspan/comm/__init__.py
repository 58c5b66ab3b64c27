"""The mesh and its collectives: one operator for each, with its adjoint as its gradient."""
