"""How my tokens' queries see all keys: on one device, by Ulysses, round a ring, or both."""
