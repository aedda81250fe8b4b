"""composer2: an open, readable implementation of how a frontier coding agent is trained."""

__version__ = "0.1.0"
