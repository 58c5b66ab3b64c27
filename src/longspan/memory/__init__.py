"""What bounds the length of a sequence, one memory option a file, each exact."""
