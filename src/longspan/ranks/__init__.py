"""The ranks of a job: how they meet, agree, are watched, started and ended."""
