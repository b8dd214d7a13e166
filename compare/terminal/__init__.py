"""Printed text: text as it is, numbers and layouts as people read them."""
