"""What a run records about itself: metrics, spans, rollouts, summary, and the readers of all of
them.

Nothing here can stop training: a file that cannot be written is reported once and given up.
"""
