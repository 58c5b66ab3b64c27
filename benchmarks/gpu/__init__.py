"""`python -m benchmarks.gpu`: what one GPU says about longspan, in one command and under eight minutes."""
