"""What is computed without torch: schedules simulated and drawn, model sizes, operations, memory."""
