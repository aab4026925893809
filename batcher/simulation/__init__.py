"""Runs the scheduler without a model: schedules and times where only lengths matter."""
