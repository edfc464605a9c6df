"""The loop: admission, episodes, batches, updates and commits of one run."""
