"""Measurements that the docs quote; each figure comes from a command here."""
