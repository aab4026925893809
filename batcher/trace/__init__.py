"""What happened in a run, from its events alone: trace files, one fold of them, and its views."""
