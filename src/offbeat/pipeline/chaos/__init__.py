"""A run under faults: break its processes from outside, then judge what it left on disk."""
