"""Requests that a server answers: the queue, the slots and the events of any run, over HTTP.

Rule: httpx and httpx-sse, which are optional, are imported by `client` alone.
"""
