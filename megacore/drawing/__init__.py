"""Pictures of schedules, timelines and curves: as SVG, as PNG, and in a terminal."""
