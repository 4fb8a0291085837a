"""Small models that foretell large ones: a ladder of short runs, the law of its losses, and the run for a budget."""
