"""The trace command: events of a trace or of a run, shown as spans, steps or a gantt."""
