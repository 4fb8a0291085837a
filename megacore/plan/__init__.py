"""The needs of a run, computed only from its configuration, without torch: schedules simulated and drawn, model
sizes, operations, memory."""
