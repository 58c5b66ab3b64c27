"""What a job costs on a mesh: bytes sent, FLOPs, memory, seconds."""
