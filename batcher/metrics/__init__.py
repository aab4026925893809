"""The numbers of a run: its summary, its latencies and what it used, from events alone.

Rule: the events are enough, live or from a trace; docs/metrics.md defines every number.
"""
