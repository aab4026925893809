"""The numbers of a run, from its events alone; docs/reference/metrics.md defines each."""
