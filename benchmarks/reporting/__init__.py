"""Rows of measurements, and the tables and plots made of them."""
