"""Closed forms of a layout: bytes sent, bytes on each device, operations."""
