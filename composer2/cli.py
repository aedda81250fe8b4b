"""The `composer2` command.

Source: row X1.
"""
