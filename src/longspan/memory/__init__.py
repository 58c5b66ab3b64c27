"""What bounds the length of a sequence, one lever a file, each exact."""
