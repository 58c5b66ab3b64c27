"""The mesh, and what is sent over it: one operator for each collective, with its adjoint as its gradient."""
