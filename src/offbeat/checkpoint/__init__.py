"""Folders that are complete or absent: written aside, flushed, renamed, verified when read."""
