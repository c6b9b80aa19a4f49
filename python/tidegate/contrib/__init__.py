"""Bridges to packages that have a way of their own to install kernels. Nothing here is imported by default."""
