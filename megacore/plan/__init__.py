"""What a run needs, computed from its configuration alone, without torch: schedules simulated and drawn, model
sizes, operations, memory."""
