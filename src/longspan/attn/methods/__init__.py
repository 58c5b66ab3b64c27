"""How local queries attend to all keys: on one device, by Ulysses, around a ring, or both."""
