"""Formats of files on disk."""
