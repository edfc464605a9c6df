"""Rollouts: how a prompt becomes scored siblings, and how these become training rows."""
