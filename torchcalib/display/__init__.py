"""Presentation of results: tables with their text and HTML renderers, and numbers in words."""
