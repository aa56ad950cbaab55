"""Preference tuning: which of two answers is the better one."""
