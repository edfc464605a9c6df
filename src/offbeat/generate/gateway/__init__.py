"""Answers for people and programs outside of the run: the OpenAI protocol above a ``Generator``."""
