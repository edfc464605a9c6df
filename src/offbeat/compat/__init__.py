"""Other projects' names for what is in offbeat. Nothing else in the package knows of this room."""
