"""From an adapted module to something that replays: inputs, caches, capture and executors."""
