"""From samples to the microbatches of each data-parallel rank."""
