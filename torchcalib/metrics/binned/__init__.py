"""Errors over bins of equal width or mass, ECE, ACE, ESCE, MCE, RMSCE, as functions and as streaming classes.

Each has a room for its function and its class; `reading` is what takes them from predictions to bins and to a value.
"""
