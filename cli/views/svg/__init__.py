"""The gantt of a run as an SVG, a picture for papers and READMEs."""
