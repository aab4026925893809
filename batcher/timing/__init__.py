"""How long a step takes: formulas, profiles of real engines, rooflines, and fits to logs."""
