"""Requests that a server answers: the queue, the slots and the events of any run, over HTTP.

Rule: httpx, which is optional, is imported by `client` alone.
"""
