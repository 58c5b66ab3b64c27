"""The ranks of a job: start, rendezvous, agreement on settings, heartbeat, end."""
