"""The numbers of a run, from its events alone; docs/metrics.md defines each."""
