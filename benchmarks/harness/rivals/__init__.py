"""Clients of object stores, by task. Each module has `CLIENTS`: classes by name, whose `modules` are what their first
use imports. Every client is configured for speed as its own documentation advises.
"""
