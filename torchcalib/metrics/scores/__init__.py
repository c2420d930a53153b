"""Proper scores: means over samples of what one sample gets.

A score is data (`Score`), one engine reads every score, and the function and the streaming class of a score stand
together in its file.
"""
