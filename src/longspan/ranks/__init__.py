"""The ranks of a job: start them or join those of torchrun, compare settings, watch, end."""
