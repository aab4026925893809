"""The profiles and calibrate commands: step times shown, checked, and fitted to logs."""
