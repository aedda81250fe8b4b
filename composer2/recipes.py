"""Complete runs as functions.

Source: report §3 and §4 (the order of the stages).
"""
